"""What is known of a teacher: one hash for weights in a file, weights by a name, and a teacher trained here."""

from pathlib import Path

import pytest
import torch

from service.config.experiment import load
from service.reproduce.teacher_accuracy import measure_teacher, teacher_accuracy
from tests.run_log import add, numbers
from tests.trainables.jobs import write_teacher
from trainables.models.registry import build_model
from trainables.rundir import RunDir


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.runs.evaluate.evaluate", lambda *_: {"top1_pct": 50.0})


def hash_of(root: Path, model: str, weights: object, *data: str) -> str:
    experiment = load("digits", [f"teacher.model={model}", f"teacher.weights={weights}", *data]).experiment
    run_dir = RunDir(root)
    root.mkdir()
    found = measure_teacher(experiment, run_dir, root)
    assert found == teacher_accuracy(experiment, run_dir)
    return found.sha256


def test_weights_by_a_name_have_the_hash_of_the_file_that_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / torchvision.models.get_model_weights("squeezenet1_1").DEFAULT.url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    torch.save(build_model("squeezenet1_1", num_classes=1000, image_size=64, seed=5).state_dict(), file)
    data = ("data.path=synthetic", "data.synthetic_classes=1000", "data.synthetic_images=1000", "data.image_size=64")
    by_name = hash_of(tmp_path / "name", "squeezenet1_1", "IMAGENET1K_V1", *data)
    assert len(by_name) == 64
    assert by_name == hash_of(tmp_path / "file", "squeezenet1_1", file, *data)


def test_a_teacher_trained_here_has_the_hash_that_its_checkpoint_has_as_a_file(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "sweep")
    experiment = load("digits").experiment
    assert teacher_accuracy(experiment, run_dir) is None
    stage = run_dir.stage("teacher")
    stage.best.parent.mkdir(parents=True)
    write_teacher(stage.best)
    add(run_dir, numbers("summary", "teacher", 1, best_top1_pct=97.0))
    found = teacher_accuracy(experiment, run_dir)
    assert found is not None
    assert (found.top1_pct, found.weights) == (97.0, str(stage.best))
    assert found.sha256 == hash_of(tmp_path / "given", "mlp_large", stage.best)
