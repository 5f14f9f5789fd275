"""An init stage and the training after it: what one leaves to the other, and that a death in either changes nothing."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, relative_difference, train, write_teacher
from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.engine import checkpoint
from trainables.engine.train import build, finish_epoch, train_epoch
from trainables.errors import CheckpointError
from trainables.methods.init_stage import with_init_stage
from trainables.models.model_input import student_input
from trainables.models.pixels import take_pixels
from trainables.models.registry import build_model

LR, MOMENTUM, DECAY = 0.02, 0.9, 1e-3


def jobs(folder: Path, options: dict[str, dict[str, Any]], **sections: Any) -> list[TrainConfig]:
    """Of methods with these options, on noise images in float64: 3 steps an epoch."""
    settings = config(
        folder / "student",
        model="resnet8",
        teacher={"model": "resnet14", "weights": write_teacher(folder / "t.safetensors", "resnet14")},
        data={"path": "synthetic", "synthetic_images": 50, "synthetic_classes": 10, "global_batch_size": 20},
        optim={"epochs": 2, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "nesterov": False, "schedule": "constant"},
        train={"log_every": 1, "checkpoint_every": 1},
    )
    distill = {"method": list(options), "task_weight": 1.0, "options": options}
    return with_init_stage(TrainConfig.model_validate({**settings.model_dump(), "distill": distill, **sections}))


def test_the_training_begins_with_the_trained_student_a_fresh_optimizer_and_the_images_that_come_next(tmp_path: Path) -> None:
    init, settings = jobs(tmp_path, {"ab": {"init_epochs": 2}})
    left, found = train(Group(), init)["state"], train(Group(), settings)["state"]
    plain: Any = build_model("resnet8", num_classes=10, image_size=8, seed=0).double()
    plain.load_state_dict(left)
    take_pixels(plain, student_input(settings.data))
    sgd = torch.optim.SGD(plain.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
        for epoch in (2, 3):
            for batch in on_device(job.train_loader.epoch(epoch), torch.device("cpu"), epoch):
                images = job.train_state.prepare(batch).images_BCHW
                sgd.zero_grad()
                nn.functional.cross_entropy(plain(images), batch.labels_B).backward()
                sgd.step()
        assert list(job.train_state.distillation_module.methods) == []  # ab has no loss in the training
    assert relative_difference({n: p.detach() for n, p in plain.named_parameters()}, found) < 1e-11


@pytest.mark.parametrize("options", [{"fsp": {"init_epochs": 2}}, {"ft": {"init_epochs": 2}, "kd": {}}], ids=str)
def test_a_death_in_the_init_stage_or_after_it_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = [train(Group(), each) for each in jobs(tmp_path / "whole", options)]
    for each, undisturbed in zip(jobs(tmp_path / "cut", options), whole, strict=True):
        assert train(Group(), each, 5)["died"]  # in the second epoch
        resumed = train(Group(), each)
        assert equal(resumed["state"], undisturbed["state"])
        assert all(kind != "step" or step > 3 for kind, step, _ in resumed["calls"])


def test_a_method_with_a_shorter_init_stage_begins_later(tmp_path: Path) -> None:
    init, settings = jobs(tmp_path, {"ab": {"init_epochs": 1}, "ft": {"init_epochs": 3}})
    before = build_model("resnet8", num_classes=10, image_size=8, seed=3).double().state_dict()
    states: list[dict[str, Tensor]] = []
    report = Recorded()
    with contextlib.closing(build(init, Group(), report, no_telemetry)) as job:
        for _ in range(3):
            train_epoch(job)
            finish_epoch(job)
            states.append({name: tensor.clone() for name, tensor in job.student.state_dict().items()})
    assert equal(before, states[0])
    assert equal(before, states[1])
    assert not equal(before, states[2])
    recorded = [set(metrics) for kind, _, metrics in report.calls if kind == "epoch"]
    assert ["epoch/train/ab/boundary" in names for names in recorded] == [False, False, True]
    assert all("epoch/train/ft/reconstruction" in names for names in recorded)
    assert (init.optim.epochs, settings.optim.epochs) == (3, 2)


def test_steps_that_are_timed_have_no_init_stage(tmp_path: Path) -> None:
    (settings,) = jobs(tmp_path, {"ab": {"init_epochs": 2}}, train={"max_steps": 2})
    assert settings.init_checkpoint is None


def test_a_training_whose_init_stage_left_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    init, settings = jobs(tmp_path, {"ft": {"init_epochs": 1}})
    train(Group(), init.model_copy(update={"model": "resnet14"}))
    assert settings.init_checkpoint is not None
    assert checkpoint.read_metadata(Path(settings.init_checkpoint))["stage"] == "student-init"
    with pytest.raises(CheckpointError, match="holds resnet14 with 10 classes, but the experiment has resnet8"):
        train(Group(), settings)
