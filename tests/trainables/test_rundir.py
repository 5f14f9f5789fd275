"""Files that survive a death at any moment."""

import os
from pathlib import Path

import pytest

from trainables.rundir import headline, lines_after, replacing, write_atomic, write_text


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomic(path, b"old")

    def die_half_way() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        die_half_way()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_is_not_utf_8_is_written_with_its_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "page", os.fsdecode(b"run caf\xe9"))
    assert (tmp_path / "page").read_bytes() == b"run caf\xe9"


def test_a_line_torn_by_a_death_spoils_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "met\n{"step": 3}\n{"st')
    assert [line.record for line in lines_after(path, 0)] == [{"step": 1}, None, {"step": 3}]
    assert lines_after(tmp_path / "none.jsonl", 0) == []


def test_lines_are_read_whole_whatever_the_size_of_a_chunk(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    whole = "".join(f'{{"text": "{"x" * length}"}}\n' for length in (0, 10, 1000))
    path.write_text(f'{whole}{{"torn": 1')
    size = path.stat().st_size - len(b'{"torn": 1')
    for chunk_bytes in (1, 7, 100, 10_000):
        offset, lengths = 0, []
        while lines := lines_after(path, offset, chunk_bytes):
            offset = lines[-1].end
            lengths += [len(line.record["text"]) for line in lines if line.record]
        assert (offset, lengths) == (size, [0, 10, 1000])


def test_a_stages_final_numbers_have_the_cosine_of_its_last_evaluation() -> None:
    assert headline({"val/cka": 0.5, "val/cosine": 0.25}) == {"cka": 0.5, "cosine": 0.25}
    assert headline({"val/raw_top1_pct": 50.0, "val/raw_loss": 1.5}) == {"raw_top1_pct": 50.0, "raw_loss": 1.5}
