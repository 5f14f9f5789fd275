"""A student that begins with weights: all of it is trained, or its classifier alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainables.jobs import config, train, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.errors import ExperimentError
from trainables.models.registry import build_model


def pretrained(folder: Path, **sections: Any) -> TrainConfig:
    weights = write_teacher(folder / "weights.safetensors", "convnet_small", num_classes=7)
    return config(folder / "out", teacher=None, model="convnet_small", weights=weights, **sections)


def test_a_frozen_student_trains_its_classifier_alone(tmp_path: Path) -> None:
    state = train(Group(), pretrained(tmp_path, freeze=True))["state"]
    before = build_model("convnet_small", num_classes=7, image_size=8, seed=11).state_dict()
    same = {name: before[name].shape == state[name].shape and torch.equal(before[name], state[name].float()) for name in before}
    changed = [name for name in before if not same[name]]
    assert changed == ["head.weight", "head.bias"]


def test_a_student_begins_with_its_weights_and_all_of_it_is_trained(tmp_path: Path) -> None:
    settings = pretrained(tmp_path, optim={"lr": 1e-9})
    state = train(Group(), settings)["state"]
    before = build_model("convnet_small", num_classes=7, image_size=8, seed=11).state_dict()
    name = "features.0.weight"
    assert not torch.equal(state[name], before[name].double())
    torch.testing.assert_close(state[name], before[name].double(), rtol=0, atol=1e-6)


def test_a_frozen_student_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"student.freeze .*needs student.weights"):
        train(Group(), config(tmp_path, teacher=None, freeze=True))
