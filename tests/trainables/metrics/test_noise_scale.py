"""The gradient noise scale against its definition: per-sample gradients, a known covariance, and DDP without the measurement."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize

from tests.trainables.jobs import (
    Recorded,
    config,
    equal,
    no_telemetry,
    relative_difference,
    train,
    with_noise_scale,
    write_teacher,
)
from trainables.config import TrainConfig
from trainables.data.order import rank_part
from trainables.device.device_batches import on_device
from trainables.distributed.group import GlobalCount, Group, all_reduce_sum
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build, train_step
from trainables.metrics.noise_scale import DECAY, SUMS, GradientNoise, NoiseHistory
from trainables.models.registry import build_model

SHORT = {"path": "synthetic", "synthetic_images": 34, "global_batch_size": 32, "image_size": 8}
"""Two steps an epoch, of 32 images and of 2: on three ranks 11, 11 and 10, then 1, 1 and none."""


def steps_taken(group: Group, settings: TrainConfig) -> list[dict[str, Any]]:
    """An epoch's steps: the parameters before, the images of this rank and what all ranks together say of the noise."""
    estimates = []
    with contextlib.closing(build(with_noise_scale(settings), group, Recorded(), no_telemetry)) as job:
        assert job.train_state.update.noise is not None
        for step, batch in enumerate(on_device(job.train_loader.epoch(0), group.device)):
            before = {name: tensor.clone() for name, tensor in job.student.state_dict().items()}
            numbers = {
                "before": before,
                "images": normalize(
                    job.train_state.prepare(batch).images_BCHW, *map(list, (job.config.data.mean, job.config.data.std))
                ),
                "labels": batch.labels_B.clone(),
            }
            train_step(job.train_state, batch, step, job.metrics.timer)
            estimates.append(numbers | {"noise": all_reduce_sum(job.train_state.update.noise.take(), group).tolist()})
    return estimates


def from_definition(state: dict[str, Tensor], images: Tensor, labels: Tensor, sizes: list[int]) -> list[float]:
    """tr(Σ), |G|² and the squared norm of the whole from each sample's own gradient, the parts being runs of `sizes` samples.

    The first as the spread of the parts' means (n_p·|G_p − G|² over the degrees of freedom), as in an analysis of variance.
    """
    model = build_model("mlp_small", num_classes=10, image_size=8, seed=0).double()
    model.load_state_dict(state)
    rows = []
    for image, label in zip(images, labels, strict=True):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(image[None]), label[None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    whole = torch.stack(rows).mean(0)
    means = [part.mean(0) for part in torch.stack(rows).split(sizes)]
    trace = sum(n * (mean - whole).square().sum() for n, mean in zip(sizes, means, strict=True)) / (len(sizes) - 1)
    big = whole.square().sum()
    return [float(trace), float(big - trace / len(images)), float(big)]


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 3), (2, 1), (3, 1), (3, 2)])
def test_a_steps_estimates_are_those_of_its_parts_own_gradients(
    ranks: RankPool, tmp_path: Path, world_size: int, accumulate: int
) -> None:
    settings = config(tmp_path, teacher=None, data=SHORT, optim={"accumulate": accumulate})
    by_rank = ranks.run(world_size, steps_taken, settings)
    assert len(by_rank[0]) == 2
    for number, step in enumerate(by_rank[0]):
        images, labels = (torch.cat([estimates[number][name] for estimates in by_rank]) for name in ("images", "labels"))
        count = len(labels)
        parts = world_size if world_size > 1 else accumulate
        cuts = [rank_part(0, count, part, parts) for part in range(parts)]
        sizes = [stop - start for start, stop in cuts if stop > start]
        trace, square, big = from_definition(step["before"], images, labels, sizes)
        assert step["noise"] == pytest.approx([trace, square, big, 1.0], rel=1e-9)
    assert (count, sizes) == (2, [1, 1])


def norm_of(model: nn.Linear) -> Tensor:
    assert model.weight.grad is not None
    return torch.linalg.vector_norm(model.weight.grad)


def test_over_many_steps_the_known_covariance_comes_out() -> None:
    generator = torch.Generator().manual_seed(5)
    mean, deviation = torch.linspace(-1, 1, 8, dtype=torch.float64), torch.linspace(0.5, 3, 8, dtype=torch.float64)
    model = nn.Linear(8, 1, bias=False).double()  # the gradient of w·x is x
    noise, scaler = GradientNoise(model, Group()), torch.amp.GradScaler("cpu", enabled=False)
    parts, size, steps = 3, 4, 1000
    for _ in range(steps):
        for _ in range(parts):
            x = mean + deviation * torch.randn(size, 8, generator=generator, dtype=torch.float64)
            (model(x).sum() / (parts * size)).backward()
            noise.end_micro_batch(size)
        noise.end_step(GlobalCount(parts * size, Group(), accumulate=parts), scaler, norm_of(model))
        model.zero_grad()
    trace, square, big, measured = noise.take().tolist()
    assert measured == steps
    assert trace / steps == pytest.approx(float(deviation.square().sum()), rel=0.04)
    assert square / steps == pytest.approx(float(mean.square().sum()), rel=0.06)
    assert big / steps == pytest.approx(square / steps + trace / steps / (parts * size), rel=1e-9)


def train_watched(group: Group, settings: TrainConfig, die_after: int | None = None) -> dict[str, Any]:
    return train(group, with_noise_scale(settings), die_after)


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (3, 1), (3, 2)])
def test_what_is_trained_is_bit_for_bit_what_ddp_trains(
    ranks: RankPool, tmp_path: Path, world_size: int, accumulate: int
) -> None:
    settings = {
        "model": "convnet_small",
        "precision": "fp32",
        "optim": {"epochs": 2, "lr": 0.05, "accumulate": accumulate},
        "teacher": {"weights": write_teacher(tmp_path / "t.safetensors")},
    }
    watched = ranks.run(world_size, train_watched, config(tmp_path / "watched", **settings))
    bare = ranks.run(world_size, train, config(tmp_path / "bare", **settings))
    assert all(equal(one["state"], other["state"]) for one, other in zip(watched, bare, strict=True))
    assert "noise_scale" in watched[0]["calls"][-1][2]


def test_micro_batches_that_are_watched_train_the_same_bits(tmp_path: Path) -> None:
    settings = {"model": "convnet_small", "precision": "fp32", "teacher": None, "optim": {"accumulate": 2}}
    watched = train_watched(Group(), config(tmp_path / "watched", **settings))["state"]
    assert equal(watched, train(Group(), config(tmp_path / "bare", **settings))["state"])


def test_the_scalers_factor_is_divided_out(ranks: RankPool, tmp_path: Path) -> None:
    settings = {"teacher": None, "optim": {"epochs": 1, "lr": 0.01}}
    recorded = {
        precision: ranks.run(2, train_watched, config(tmp_path / precision, precision=precision, **settings))[0]["calls"][-2][2]
        for precision in ("fp16", "fp32")
    }
    for name in ("epoch/train/noise_scale", "epoch/train/grad_norm"):
        assert recorded["fp16"][name] == pytest.approx(recorded["fp32"][name], rel=0.03)


def test_a_step_that_overflowed_and_one_of_a_single_part_are_not_counted() -> None:
    model, scaler = nn.Linear(1, 1, bias=False), torch.amp.GradScaler("cpu", enabled=False)
    noise = GradientNoise(model, Group())
    for factors in ((1.0, 3.0), (1.0, float("inf")), (2.0,)):
        for factor in factors:
            model(torch.full((1, 1), factor / len(factors))).sum().backward()
            noise.end_micro_batch(1)
        noise.end_step(GlobalCount(len(factors), Group(), accumulate=len(factors)), scaler, norm_of(model))
        model.zero_grad()
    assert noise.take().tolist() == pytest.approx([2.0, 3.0, 4.0, 1.0])  # of 1 and 3: variance 2, mean 2, 4 − 2/2 = 3
    assert noise.take().tolist() == [0.0] * len(SUMS)


def test_log_lines_epochs_and_the_summary_have_it_where_there_is_something_to_compare(ranks: RankPool, tmp_path: Path) -> None:
    for world_size, accumulate in ((2, 1), (1, 2)):
        optim = {"epochs": 2, "accumulate": accumulate}
        calls = ranks.run(world_size, train_watched, config(tmp_path / str(world_size), teacher=None, optim=optim))[0]["calls"]
        of = {kind: [metrics for name, _, metrics in calls if name == kind] for kind in ("step", "epoch", "summary")}
        assert all(metrics["train/noise_scale"] > 0 and metrics["train/grad_norm"] > 0 for metrics in of["step"])
        learned = [{name.removeprefix("epoch/train/"): value for name, value in metrics.items()} for metrics in of["epoch"]]
        assert all(metrics["noise_scale"] > 0 and metrics["grad_norm"] > 0 for metrics in learned)
        assert of["summary"][0]["noise_scale"] > 0
    alone = train_watched(Group(), config(tmp_path / "alone", teacher=None))["calls"]
    unasked = ranks.run(2, train, config(tmp_path / "unasked", teacher=None))[0]["calls"]
    assert not [name for _, _, metrics in (*alone, *unasked) for name in metrics if "noise" in name or "grad_norm" in name]


def test_a_resumed_job_knows_the_noise_as_if_it_had_not_died(ranks: RankPool, tmp_path: Path) -> None:
    settings = {"teacher": None, "optim": {"epochs": 2}, "train": {"checkpoint_every": 6}}
    whole = ranks.run(2, train_watched, config(tmp_path / "whole", **settings))[0]
    for die_after in (5, None):
        pieces = ranks.run(2, train_watched, config(tmp_path / "pieces", **settings), die_after)[0]
    assert pieces["noise"] == whole["noise"]
    assert pieces["calls"][-1][2]["noise_scale"] == whole["calls"][-1][2]["noise_scale"]
    other = ranks.run(3, train_watched, config(tmp_path / "other", **settings))[0]
    assert relative_difference(other["state"], whole["state"]) < 1e-9
    assert other["noise"]["whole"][3] == whole["noise"]["whole"][3]


def test_the_moving_average_is_unbiased_from_the_first_line_on() -> None:
    history = NoiseHistory()
    assert history.add([30.0, 2.0, 8.0, 2.0]) == pytest.approx({"noise_scale": 15.0, "grad_norm": 2.0})
    assert history.add([0.0] * 4) == pytest.approx({"noise_scale": 15.0, "grad_norm": 2.0})
    later = history.add([90.0, 2.0, 8.0, 2.0])["noise_scale"]
    assert later == pytest.approx((DECAY**2 * 30 + 90) / (DECAY**2 * 2 + 2))


def test_gradients_that_drown_in_noise_have_no_noise_scale() -> None:
    history = NoiseHistory()
    assert set(history.add([30.0, -2.0, 8.0, 2.0])) == {"grad_norm"}
    assert set(history.end_epoch()) == {"grad_norm"}
    assert history.whole() == {}


def test_the_whole_jobs_noise_scale_is_the_mean_over_progress() -> None:
    history, batch = NoiseHistory(), 32.0
    rng = np.random.default_rng(0)
    scales, steps, squares = rng.uniform(1, 500, 9), rng.integers(3, 40, 9), rng.uniform(0.01, 5, 9)
    for scale, count, square in zip(scales, steps, squares, strict=True):
        history.add([scale * square * count, square * count, (square + scale * square / batch) * count, float(count)])
        assert history.end_epoch()["noise_scale"] == pytest.approx(scale)
    progress = steps / (1 + scales / batch)
    assert history.whole()["noise_scale"] == pytest.approx((progress * scales).sum() / progress.sum())
    assert steps.sum() == pytest.approx(progress.sum() * (1 + history.whole()["noise_scale"] / batch))
