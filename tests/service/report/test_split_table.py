"""`distill split`: the blocks of a student and where to cut it, and what is refused in one line."""

import pytest

from tests.service.commands import run


def test_the_blocks_the_cut_and_the_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "split", "digits", "--stages", "3")
    assert code == 0
    assert "convnet_small in 3 stages, 12 micro-batches of 6 images" in out
    rows = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    assert len(rows) == 11
    assert [row[1].strip() for row in rows] == sorted(row[1].strip() for row in rows)
    begins = {row[1].strip(): row[2].strip() for row in reversed(rows)}
    assert f"write scale.cut: [{begins['1']}, {begins['2']}]; schedule 1f1b" in out
    assert "teacher: " in out
    assert "bubble (S - 1)/(M + S - 1) = 14 % of a step, for 3 equal stages, 12 micro-batches" in out


def test_a_student_without_a_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "split", "digits", "--set", "teacher=null", "--set", "distill.method=none")
    assert code == 0
    assert "convnet_small in 2 stages" in out
    assert "teacher" not in out


def test_too_many_stages_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "split", "digits", "--stages", "12")
    assert (code, out) == (2, "")
    assert err == "error: model convnet_small can be cut at 10 points: write scale.pipeline_stages at most 11\n"
