"""Optimizers by name: what is refused, and that a training goes on with each as if it had not been interrupted."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.optim import list_optimizers
from torch import nn

from tests.trainables.jobs import config, relative_difference, save, train
from trainables.config import OptimConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.engine.checkpoint import CheckpointState, Progress
from trainables.engine.optim import build_optimizer, parameter_copies
from trainables.engine.optimizers import check_optimizer
from trainables.errors import ExperimentError


def can_be_used(name: str) -> bool:
    try:
        check_optimizer(OptimConfig(name=name))
    except ExperimentError:
        return False
    return True


def state_of(name: str) -> CheckpointState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    optimizer = build_optimizer(model.parameters(), OptimConfig(name=name, lr=0.01, decay_norm_and_bias=False), {})
    about = {"model": "m", "num_classes": 3, "classes": ["a", "b", "c"]}
    return CheckpointState(model, nn.ModuleDict(), [optimizer], torch.amp.GradScaler("cpu", enabled=False), Progress(), about)


def step(state: CheckpointState, seed: int) -> None:
    images_BCHW = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    state.student(images_BCHW).square().sum().backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()


def test_every_optimizer_that_is_not_refused_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    names = [name for name in list_optimizers() if can_be_used(name)]
    assert {"lamb", "lion", "muon", "adan", "nadamw", "novograd"} <= {*names}
    assert len(names) > 70
    for name in names:
        whole, before, after = state_of(name), state_of(name), state_of(name)
        for seed in range(3):
            step(whole, seed)
            step(before, seed)
        save(tmp_path / name, before, Group())
        checkpoint.restore(tmp_path / name, after, Group())
        for seed in range(3, 6):
            step(whole, seed)
            step(after, seed)
        for one, other in zip(whole.student.parameters(), after.student.parameters(), strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        (
            {"name": "nothing_like_it"},
            "there is no nothing_like_it: write sgd, adamw, dot, or one of timm.optim.list_optimizers(), such as lamb",
        ),
        ({"name": "adahessian"}, "adahessian needs second derivatives"),
        ({"name": "kron"}, "kron stores Q as list, not as a tensor: choose another one"),
        ({"name": "adamw", "args": {"beta": 1}}, "adamw has no argument beta: write one of betas, eps"),
        ({"name": "lamb", "args": {"max_grad_norm": 1.0}}, "lamb has no argument max_grad_norm"),
        (
            {"name": "adamw", "args": {"betas": [0.9, 1.5]}},
            "optim.args: adamw does not work with these (ValueError: Invalid beta",
        ),
        ({"name": "adamw", "args": {"betas": [0.9]}}, "optim.args: adamw does not work with these (IndexError"),
        ({"name": "adamw", "args": {"eps": "x"}}, "optim.args: adamw does not work with these (TypeError"),
        ({"name": "adamw", "args": {"capturable": True}}, "adamw has no argument capturable: write one of betas, eps"),
        ({"name": "adamw", "args": {"differentiable": True}}, "adamw has no argument differentiable"),
        ({"name": "sgd", "args": {"dampening": 0.5}}, "sgd has no argument dampening: remove it"),
        ({"name": "LAMB"}, "there is no LAMB: did you mean lamb?"),
        ({"name": "bnbadam8bit"}, "bnbadam8bit needs bitsandbytes, which is not supported: choose another one, such as adamw"),
        ({"name": "fusedlamb"}, "fusedlamb needs apex, which is not supported"),
        ({"name": "adamw", "args": {"lr": 1.0}}, "adamw has no argument lr"),
    ],
)
def test_what_cannot_be_built_or_saved_is_refused_in_one_line(optim: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        check_optimizer(OptimConfig(**optim))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "num_states"), [("adan", 4), ("madgrad", 3), ("mars", 3), ("lion", 1), ("lamb", 2)])
def test_the_memory_of_the_state_is_measured(name: str, num_states: int) -> None:
    assert parameter_copies(OptimConfig(name=name)) == 2 + num_states


def test_arguments_reach_the_constructor() -> None:
    optimizer = build_optimizer([nn.Parameter(torch.ones(2))], OptimConfig(name="adamw", args={"betas": [0.8, 0.95]}), {})
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)


@pytest.mark.parametrize(
    "optim",
    [
        {"name": "lamb", "lr": 0.01, "nesterov": False, "clip_grad_norm": 1.0},
        {"name": "muon", "lr": 0.01},
        {"clip_grad_value": 0.01, "ema_decay": 0.9},
        {"clip_grad_agc": 0.02},
    ],
)
def test_three_workers_learn_what_one_does(tmp_path: Path, ranks: RankPool, optim: dict[str, Any]) -> None:
    sections = {"teacher": None, "optim": optim}
    (one,) = ranks.run(1, train, config(tmp_path / "one", **sections))
    for each in ranks.run(3, train, config(tmp_path / "three", **sections)):
        assert relative_difference(one["state"], each["state"]) < 1e-9
