"""`train.compile` changes the speed of a training and nothing else: against the same training run eagerly, in float64."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainables.engine.first_steps import compiled_without_kernels, settings, state_after
from tests.trainables.engine.test_loss_optimizers import two_heads
from tests.trainables.jobs import relative_difference
from trainables.config import TrainConfig
from trainables.device.compilation import Compilation
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.methods.registry import METHODS


def compiled(config: TrainConfig, mode: bool | str = True) -> TrainConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": mode})})


def state_compiled(group: Group, config: TrainConfig) -> dict[str, Tensor]:
    with compiled_without_kernels():
        return state_after(compiled(config), group)


def state_eager(group: Group, config: TrainConfig) -> dict[str, Tensor]:
    return state_after(config, group)


def largest_difference(ranks: RankPool, config: TrainConfig, num_workers: int) -> float:
    eager, of_compiled = (ranks.run(num_workers, train, config)[0] for train in (state_eager, state_compiled))
    return relative_difference(eager, of_compiled)


@pytest.mark.parametrize(
    "name", ["fitnet", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "fitnet")]
)
def test_two_workers_of_whom_one_has_a_short_last_batch_learn_the_same_compiled(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    assert largest_difference(ranks, settings(name, tmp_path, "fp64"), 2) < 1e-9


@pytest.mark.parametrize(
    ("num_images", "sections"),
    [
        pytest.param(41, {}, id="a worker without images"),
        pytest.param(44, {"optim": {"accumulate": 3}, "scale": {"sync_batch_norm": False}}, id="accumulation"),
        pytest.param(44, {"optim": {"name": "dot", "nesterov": False, "momentum": 0.9}}, id="dot"),
    ],
)
def test_steps_of_other_shapes_and_updates_are_the_same_compiled(
    ranks: RankPool, tmp_path: Path, num_images: int, sections: dict[str, Any]
) -> None:
    config = settings("kd", tmp_path, "fp64", data={"synthetic_images": num_images}, **sections)
    assert largest_difference(ranks, config, 2) < 1e-9


def test_several_optimizers_share_one_compiled_forward(ranks: RankPool, tmp_path: Path) -> None:
    config = two_heads(tmp_path, losses={"SecondHead": {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}})
    assert largest_difference(ranks, config, 1) < 1e-9


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no compiler")
@pytest.mark.parametrize("mode", [True, "reduce-overhead", "max-autotune"])
def test_torchs_own_kernels_learn_the_same(tmp_path: Path, mode: bool | str) -> None:
    config = settings("fitnet", tmp_path, "fp64")
    torch.compiler.reset()
    of_compiled = state_after(compiled(config, mode), Group(), steps=6)
    assert relative_difference(state_after(config, Group(), steps=6), of_compiled) < 1e-9


def test_a_batch_of_another_size_than_the_regular_ones_is_not_compiled(tmp_path: Path) -> None:
    compilation = Compilation.of(compiled(settings("kd", tmp_path, optim={"accumulate": 3})))
    sizes = list[int]()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        sizes.append(len(inputs[0]))
        return graph

    double = torch.compile(lambda images_BC: 2 * images_BC, backend=backend, dynamic=False)
    for num_images in (8, 3, 2, 1, 0):
        with compilation.batch(num_images):
            double(torch.ones(num_images, 4))
    assert sizes == [3, 2]  # of a batch of 8 in three parts
