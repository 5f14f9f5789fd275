"""Files that survive a death at any moment."""

from pathlib import Path

import pytest

from trainables.rundir import append_line, headline, read_lines, replacing, write_atomic


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


def test_a_line_torn_by_a_death_spoils_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1})
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "met')
    append_line(path, {"step": 3})
    assert read_lines(path) == [{"step": 1}, {"step": 3}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_a_stages_final_numbers_have_the_cosine_of_its_last_evaluation() -> None:
    assert headline({"val/cka": 0.5, "val/cosine": 0.25}) == {"cka": 0.5, "cosine": 0.25}
    assert headline({"val/raw_top1_pct": 50.0, "val/raw_loss": 1.5}) == {"raw_top1_pct": 50.0, "raw_loss": 1.5}
