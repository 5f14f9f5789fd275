"""The spool's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.tracking.spool import lines_after
from trainables.rundir import append_line


def test_lines_are_read_whole_whatever_the_size_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    for length in (0, 10, 1000):
        append_line(path, {"text": "x" * length})
    path.write_bytes(path.read_bytes() + b'{"torn": 1')
    size = path.stat().st_size - len(b'{"torn": 1')
    for chunk_bytes in (1, 7, 100, 10_000):
        monkeypatch.setattr("service.tracking.spool.CHUNK_BYTES", chunk_bytes)
        offset, lengths = 0, []
        while lines := lines_after(path, offset):
            offset = lines[-1].end
            lengths += [len(line.record["text"]) for line in lines if line.record]
        assert (offset, lengths) == (size, [0, 10, 1000])
