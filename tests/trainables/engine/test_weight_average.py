"""Averages of weights: what they are, that they are what is evaluated and kept, and that a resume goes on with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from tests.trainables.jobs import config, equal, train, write_teacher
from trainables.config import DataConfig, EvaluateConfig, TrainConfig
from trainables.distributed.group import Group
from trainables.engine import checkpoint
from trainables.engine.evaluate import evaluate_checkpoint
from trainables.engine.weight_average import WeightAverage
from trainables.errors import CheckpointError
from trainables.metrics.heartbeat import Heartbeat
from trainables.rundir import StageDir


def job(folder: Path, **sections: Any) -> TrainConfig:
    optim = {"epochs": 2, "ema_decay": 0.9, **sections.pop("optim", {})}
    return config(folder, teacher=None, model="convnet_small", optim=optim, **sections)


def test_it_is_that_of_timm_with_warm_up_of_weights_and_statistics() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    ours, theirs = WeightAverage(model, nn.ModuleDict(), 0.7), ModelEmaV3(model, decay=0.7, use_warmup=True, warmup_power=2 / 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(8):
        model(torch.randn(5, 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        ours.update(number)
        theirs.update(model, step=number + 1)
    for name, average in ours.tensors.items():
        torch.testing.assert_close(average, theirs.module.state_dict()[name.removeprefix("model.")], rtol=1e-12, atol=1e-14)
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ours.swapped():
        torch.testing.assert_close(model[0].weight.detach(), theirs.module[0].weight.detach())
    assert equal(trained, model.state_dict())


def test_the_averages_are_evaluated_and_saved_with_the_trained_weights(tmp_path: Path) -> None:
    outcome = train(Group(), job(tmp_path / "run"))
    plain = train(Group(), job(tmp_path / "plain", optim={"ema_decay": None}))
    assert equal(outcome["state"], plain["state"])  # they change nothing of what is trained
    epochs = [[metrics for kind, _, metrics in each["calls"] if kind == "epoch"] for each in (outcome, plain)]
    for averaged, trained in zip(*epochs, strict=True):
        assert averaged["val/raw_top1_pct"] == trained["val/top1_pct"]
        assert averaged["val/raw_loss"] == trained["val/loss"] != averaged["val/loss"]
    stage = StageDir(tmp_path / "run")
    tensors, _ = checkpoint.read(stage.last)
    assert equal(
        {name.removeprefix("raw."): value for name, value in tensors.items() if name.startswith("raw.")},
        {f"model.{name}": value for name, value in outcome["state"].items() if value.is_floating_point()},
    )
    data = DataConfig(path="digits", image_size=8, loader_workers=1)
    settings = EvaluateConfig(checkpoint=str(stage.last), output=str(tmp_path / "e.json"), data=data, precision="fp64")
    assert evaluate_checkpoint(settings, Group(), Heartbeat())["top1_pct"] == epochs[0][-1]["val/top1_pct"]


@pytest.mark.slow
def test_a_methods_head_is_averaged_with_the_student_that_is_judged_through_it(tmp_path: Path) -> None:
    def embed(name: str, **own: Any) -> TrainConfig:
        teacher = {"model": "convnet_large", "weights": write_teacher(tmp_path / f"{name}.safetensors", "convnet_large", 7)}
        distill = {"method": ["embed"], "task_weight": None, "options": {"embed": {"balance": True}}}
        sections: dict[str, Any] = {"teacher": teacher, "data": {"labels": False}, "distill": distill}
        optim = {"epochs": 2, "lr": 0.01, **own}
        return config(tmp_path / name, model="convnet_small", optim=optim, train={"checkpoint_every": 5}, **sections)

    outcome, plain = train(Group(), embed("run", ema_decay=0.9)), train(Group(), embed("plain"))
    epochs = [[metrics for kind, _, metrics in each["calls"] if kind == "epoch"] for each in (outcome, plain)]
    for averaged, trained in zip(*epochs, strict=True):
        assert averaged["val/raw_cosine"] == trained["val/cosine"] != averaged["val/cosine"]
    tensors, _ = checkpoint.read(StageDir(tmp_path / "run").last)
    heads = [name for name in tensors if name.startswith("raw.method.embed.")]
    assert heads
    assert not any(torch.equal(tensors[name], tensors[name.removeprefix("raw.")]) for name in heads)
    assert "method.embed.mean_loss" in tensors
    assert "raw.method.embed.mean_loss" not in heads  # a memory of steps, not weights
    assert train(Group(), embed("parts", ema_decay=0.9), die_after=8)["died"]
    train(Group(), embed("parts", ema_decay=0.9))
    assert equal(tensors, checkpoint.read(StageDir(tmp_path / "parts").last)[0])


def test_a_resume_goes_on_with_the_averages_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = job(tmp_path / "whole", train={"checkpoint_every": 5}), job(tmp_path / "parts", train={"checkpoint_every": 5})
    train(Group(), whole)
    assert train(Group(), parts, die_after=4)["died"]
    train(Group(), parts)
    first, second = (checkpoint.read(StageDir(tmp_path / name).last)[0] for name in ("whole", "parts"))
    assert equal(first, second)
    assert any(name.startswith("raw.") for name in first)


def test_a_resume_without_the_averages_or_with_new_ones_is_refused(tmp_path: Path) -> None:
    train(Group(), job(tmp_path / "with"), die_after=8)
    with pytest.raises(CheckpointError, match=r"has averages of the weights: resume with the same optim.ema_decay"):
        train(Group(), job(tmp_path / "with", optim={"ema_decay": None}))
    train(Group(), job(tmp_path / "without", optim={"ema_decay": None}), die_after=8)
    with pytest.raises(CheckpointError, match="has no averages of the weights"):
        train(Group(), job(tmp_path / "without"))
