"""Whoever reads a run runs no code of the run's author, and needs none of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.commands import run
from tests.service.report.runs import train_dir
from trainables.methods import source_of
from trainables.rundir import RunDir

METHOD = """
from pathlib import Path
from trainables.methods.contract import Method

Path({marker!r}).touch()


class Own(Method):
    terms = ("none",)
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists once the code of the method has run."""
    return tmp_path / "marker"


@pytest.fixture
def method(tmp_path: Path, marker: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(METHOD.format(marker=str(marker)))
    return path


@pytest.fixture
def run_dir(tmp_path: Path, method: Path) -> RunDir:
    """A complete run whose method is a file."""
    found = train_dir(tmp_path / "theirs")
    text = found.experiment.read_text()
    assert "  method:\n  - kd\n  " in text
    text = text.replace("  method:\n  - kd\n  ", f"  method:\n  - {method}:Own\n  ")
    searched = f"  space:\n    distill.method:\n    - {method}:Own\n    - kd\n"
    assert "  space:" in text
    before, _, after = text.partition("  space:")
    found.experiment.write_text(before + searched + after[after.index("\n  points:") + 1 :])
    return found


READERS = {
    "report": ["report", "{run}"],
    "compare": ["compare", "{run}", "{run}"],
    "doctor": ["doctor", "{run}"],
    "sync": ["sync", "{run}"],
    "show": ["show", "{run}/experiment.yaml"],
    "resume of a complete run": ["resume", "{run}"],
}


@pytest.mark.parametrize("there", [True, False], ids=["the file is there", "the file is gone"])
@pytest.mark.parametrize("command", READERS.values(), ids=READERS)
def test_a_command_that_reads_a_run_does_not_run_its_method(
    command: list[str], there: bool, run_dir: RunDir, method: Path, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not there:
        method.unlink()
    code, out, err = run(capsys, *(word.format(run=run_dir.root) for word in command))
    assert (code, err) == (0, "")
    assert out
    assert not marker.exists()


def test_evaluate_does_not_run_the_method_of_the_run_it_is_given(
    run_dir: RunDir, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "evaluate", run_dir.root, "--data", "digits", "--runs", run_dir.root / "runs")
    assert (code, err.count("\n")) == (2, 1)  # there is no checkpoint
    assert not marker.exists()


def test_the_source_of_a_method_is_read_and_not_run(method: Path, marker: Path) -> None:
    found = source_of(f"{method}:Own")
    assert found is not None
    assert found[:2] == (method, method.read_text())
    assert source_of("kd") is None
    assert not marker.exists()
