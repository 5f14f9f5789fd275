"""The spool's files."""

from pathlib import Path

from trainables.rundir import append_line, lines_after


def test_lines_are_read_whole_whatever_the_size_of_a_chunk(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for length in (0, 10, 1000):
        append_line(path, {"text": "x" * length})
    path.write_bytes(path.read_bytes() + b'{"torn": 1')
    size = path.stat().st_size - len(b'{"torn": 1')
    for chunk_bytes in (1, 7, 100, 10_000):
        offset, lengths = 0, []
        while lines := lines_after(path, offset, chunk_bytes):
            offset = lines[-1].end
            lengths += [len(line.record["text"]) for line in lines if line.record]
        assert (offset, lengths) == (size, [0, 10, 1000])
