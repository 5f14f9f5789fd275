"""`train.cuda_graphs: auto` takes graphs where the launches of a step, not the GPU, decide how long it takes."""

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.trainables.engine.graphed_jobs import CpuCapture, graphs_of, settings
from tests.trainables.jobs import Recorded, no_telemetry
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import launch_bound
from trainables.engine.graphed_step import GraphedStep
from trainables.engine.job import Job, build
from trainables.engine.launch_bound import StepTimes, measure
from trainables.engine.updates import CapturableUpdate

LAUNCHES, DEVICE = StepTimes(launch_s=8e-3, device_s=3e-3), StepTimes(launch_s=8e-3, device_s=40e-3)


@pytest.mark.parametrize(
    ("times", "is_launch_bound"),
    [
        (LAUNCHES, True),
        (DEVICE, False),
        (StepTimes(8e-3, 7.5e-3), False),
        (StepTimes(8e-3, 3e-3, allreduce_s=2e-3), True),
        (StepTimes(8e-3, 3e-3, allreduce_s=6e-3), False),
    ],
    ids=["launches", "device", "too little gained", "a fast network", "a slow network"],
)
def test_graphs_are_taken_where_they_make_a_step_at_least_a_tenth_shorter(times: StepTimes, is_launch_bound: bool) -> None:
    assert times.is_launch_bound is is_launch_bound


def auto(folder: Path, **sections: Any) -> TrainConfig:
    return settings("kd", folder, train={"cuda_graphs": "auto"}, **sections)


def built(config: TrainConfig, times: StepTimes | Exception, group: Group | None = None) -> Job:
    """A job as on a GPU, on which a step takes so long."""
    patched = mock.patch.object(launch_bound, "measure", side_effect=[times])
    with graphs_of(CpuCapture()), patched:
        return build(config, group or Group(), Recorded(), no_telemetry)


@pytest.mark.parametrize(("times", "text"), [(LAUNCHES, "auto: CUDA graphs"), (DEVICE, "auto: no CUDA graphs")])
def test_the_log_has_the_choice_of_auto_and_its_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times: StepTimes, text: str
) -> None:
    with caplog.at_level("INFO", "raydistill"), contextlib.closing(built(auto(tmp_path / "job"), times)) as job:
        assert isinstance(job.functions.train_step, GraphedStep) is times.is_launch_bound
        assert (job.functions.graphs is not None) is times.is_launch_bound
    took = f"to launch a step's passes takes {1e3 * times.launch_s:.1f} ms, to run them {1e3 * times.device_s:.1f} ms"
    assert f"student: train.cuda_graphs: {text}: {took}" in caplog.text


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (ValueError("every image is the same\nand that is a problem"), "ValueError: every image is the same\n"),
        (TypeError("no label"), "TypeError: no label\n"),
        (AssertionError(), "AssertionError: \n"),
    ],
    ids=["ValueError", "TypeError", "without a text"],
)
def test_a_method_that_refuses_images_of_zeros_has_no_graphs_and_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: Exception, text: str
) -> None:
    with caplog.at_level("INFO", "raydistill"), contextlib.closing(built(auto(tmp_path / "job"), refused)) as job:
        assert not isinstance(job.functions.train_step, GraphedStep)
    assert f"no CUDA graphs, for its steps cannot be timed: {text}" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700),
    ],
    ids=["out of memory", "a broken device"],
)
def test_what_no_step_would_survive_ends_the_job_here_too(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)):
        built(auto(tmp_path / "job"), error)


def test_a_cpu_has_none_and_times_nothing(tmp_path: Path) -> None:
    with (
        mock.patch.object(launch_bound, "measure", side_effect=AssertionError),
        contextlib.closing(build(auto(tmp_path / "job"), Group(), Recorded(), no_telemetry)) as job,
    ):
        assert not isinstance(job.functions.train_step, GraphedStep)


def test_to_time_a_step_changes_nothing_of_the_training(tmp_path: Path) -> None:
    with contextlib.closing(build(settings("crd", tmp_path / "job"), Group(), Recorded(), no_telemetry)) as job:
        module = job.train_state.distillation_module
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        random = torch.get_rng_state()
        times = measure(job.train_state, job.config.data.image_size, 8)
        assert times.launch_s > 0
        assert [name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])] == []
        assert torch.equal(torch.get_rng_state(), random)
        assert module.training
        assert all(parameter.grad is None for parameter in module.parameters())


def allreduce_on_rank(group: Group, config: TrainConfig) -> float:
    with contextlib.closing(build(config, group, Recorded(), no_telemetry)) as job:
        return launch_bound._allreduce_s(job.train_state)


def test_the_all_reduce_is_timed_on_every_worker(ranks: RankPool, tmp_path: Path) -> None:
    assert min(ranks.run(2, allreduce_on_rank, auto(tmp_path / "job"))) > 0


def chosen_on_rank(group: Group, config: TrainConfig, times: list[StepTimes]) -> tuple[bool, bool]:
    """Whether a rank has graphs, and whether it averages the gradients without DDP."""
    allreduce = mock.patch.object(launch_bound, "_allreduce_s", return_value=1e-3)
    with allreduce, contextlib.closing(built(config, times[group.rank], group)) as job:
        update = job.train_state.training_update
        return isinstance(job.functions.train_step, GraphedStep), isinstance(update, CapturableUpdate)


@pytest.mark.parametrize(("times", "graphed"), [([LAUNCHES, LAUNCHES], True), ([LAUNCHES, DEVICE], False)])
def test_all_workers_choose_the_same_by_the_slowest_of_them(
    ranks: RankPool, tmp_path: Path, times: list[StepTimes], graphed: bool
) -> None:
    found = ranks.run(2, chosen_on_rank, auto(tmp_path / "job", scale={"sync_batch_norm": False}), times)
    assert found == [(graphed, graphed)] * 2
