"""Whoever reads a run runs no code of the run's author, and needs none of it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.config.experiment import load as load_experiment
from service.config.paths import absolute_paths, with_absolute_file
from service.runs.method_copies import changed_methods
from service.runs.run_directory import begin_run, reopen
from tests.service.commands import run
from tests.service.report.runs import train_dir
from trainables.errors import ExperimentError
from trainables.methods.registry import load_method
from trainables.models.registry import build_model
from trainables.rundir import RunDir
from trainables.user_code import read_source, use_copies

METHOD = """
from pathlib import Path

from torch import nn

from trainables.methods.contract import Method

Path({marker!r}).touch()


class Own(Method):
    terms = ("none",)


class Net(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(192, num_classes)

    def forward(self, images):
        return super().forward(images.flatten(1))
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
    """A complete run whose method and student are a file."""
    found = train_dir(tmp_path / "theirs")
    text = found.experiment.read_text()
    assert "  method:\n  - kd\n  " in text
    text = text.replace("  method:\n  - kd\n  ", f"  method:\n  - {method}:Own\n  ")
    searched = f"  space:\n    distill.method:\n    - {method}:Own\n    - kd\n"
    assert text.count("  model: convnet_small\n") == 1
    text = text.replace("  model: convnet_small\n", f"  model: {method}:Net\n")
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
    found = read_source(f"{method}:Own")
    assert found is not None
    assert found[:2] == (method, method.read_text())
    assert read_source("kd") is None
    assert not marker.exists()


# A run's copy of its methods


@pytest.fixture
def begun(tmp_path: Path, method: Path) -> Iterator[RunDir]:
    """A run whose method is a file, begun and left."""
    found = RunDir(tmp_path / "begun")
    found.root.mkdir()
    resolved = load_experiment("digits", [f"distill.method={method}:Own", f"sweep.space={{distill.method: [{method}:Own, kd]}}"])
    begin_run(resolved, "train", found, tmp_path)
    yield found
    use_copies({})


def test_a_run_keeps_its_methods_source_and_hash(begun: RunDir, method: Path) -> None:
    index = json.loads(begun.methods_index.read_text())
    sha256 = hashlib.sha256(method.read_bytes()).hexdigest()
    assert index == {str(method): f"own-{sha256[:12]}.py"}
    assert (begun.methods / f"own-{sha256[:12]}.py").read_bytes() == method.read_bytes()


def test_workers_and_a_resumed_run_load_the_copy(begun: RunDir, method: Path, marker: Path) -> None:
    copy = next(begun.methods.glob("*.py"))
    assert with_absolute_file(f"{method}:Own") == f"{copy}:Own"
    method.write_text("raise ValueError('another method')")
    reopen(begun.root, to_continue=True)
    marker.unlink()
    assert load_method(f"{method}:Own").terms == ("none",)
    assert list(changed_methods(begun)) == [f"{method} has changed since the run began: the run continues with its copy {copy}"]
    method.unlink()
    assert reopen(begun.root, to_continue=True)[0].experiment.distill.method == (f"{method}:Own",)
    assert list(changed_methods(begun)) == [f"{method} no longer exists: the run continues with its copy {copy}"]


def test_a_run_goes_on_with_the_code_of_its_model(tmp_path: Path, method: Path) -> None:
    found = RunDir(tmp_path / "begun")
    found.root.mkdir()
    try:
        begin_run(load_experiment("digits", [f"student.model={method}:Net"]), "train", found, tmp_path)
        method.write_text("raise ValueError('another model')")
        experiment = reopen(found.root, to_continue=True)[0].experiment
        assert experiment.student.model == f"{method}:Net"
        model = absolute_paths({"model": experiment.student.model})["model"]
        assert model == f"{next(found.methods.glob('*.py'))}:Net"
        assert build_model(model, num_classes=10, image_size=8, seed=0) is not None
        assert "has changed since the run began" in next(changed_methods(found))
    finally:
        use_copies({})


def test_a_run_whose_method_is_as_it_was_has_nothing_to_say(begun: RunDir) -> None:
    assert list(changed_methods(begun)) == []


def test_a_copy_that_was_changed_is_refused(begun: RunDir) -> None:
    copy = next(begun.methods.glob("*.py"))
    copy.write_text("")
    with pytest.raises(ExperimentError, match=f"{copy} was changed after the run began: restore its text"):
        reopen(begun.root, to_continue=True)
    assert reopen(begun.root)[1] == begun


@pytest.mark.parametrize("text", ["no json", "[]", '{"own.py": 3}'])
def test_a_damaged_index_is_one_line(begun: RunDir, text: str) -> None:
    begun.methods_index.write_text(text)
    with pytest.raises(ExperimentError) as refused:
        reopen(begun.root, to_continue=True)
    assert str(refused.value).startswith(f"{begun.methods_index} cannot be read (")
    assert "\n" not in str(refused.value)


def test_a_run_without_methods_of_its_own_has_no_copies(tmp_path: Path) -> None:
    found = RunDir(tmp_path / "plain")
    begin_run(load_experiment("digits"), "train", found, tmp_path)
    assert not found.methods.exists()
