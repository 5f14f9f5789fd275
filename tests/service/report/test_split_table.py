"""`distill split`: the stages of a student and whether they help, all cut points, and what is refused in one line."""

import math
from pathlib import Path

import pytest

from tests.service.commands import run


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("trainables.distributed.pipeline.plan_cut.MOST_SPREAD", math.inf)  # also on a busy machine


def test_the_planned_stages_and_what_they_are_compared_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "split", "digits", "--stages", "3")
    assert code == 0
    assert "convnet_small in 3 stages, 64 images in" in out
    assert sum(line.startswith("│") for line in out.splitlines()) == 3
    for words in (
        "write scale.cut: [",
        "teacher: whole, on the last stage's device",
        "bubble ",
        "one device ",
        "DDP of 3 devices",
    ):
        assert words in out
    assert len(list((tmp_path / "raydistill" / "block_costs").iterdir())) == 2, "student and teacher"


def test_a_cut_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "split", "digits", "--cut", "features.5, head", "--set", "teacher=null", "--set", "distill.method=none"
    )
    assert code == 0
    assert "write scale.cut: [features.5, head]" in out
    assert "teacher" not in out


def test_all_cut_points(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "split", "digits", "--list")
    assert code == 0
    assert "convnet_small can be cut at 10 points (images 3×8×8)" in " ".join(out.split())
    assert "features.5" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--cut", "nowhere"],
            "scale.cut: model convnet_small cannot be cut before nowhere: choose among features.1, features.3",
        ),
        (["--cut", "head,pool"], "scale.cut: give its modules in the order of the forward pass, each once"),
        (["--stages", "12"], "model convnet_small can be cut at 10 points: write scale.pipeline_stages at most 11"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    code, out, err = run(capsys, "split", "digits", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1
