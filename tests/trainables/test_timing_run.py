"""Timing runs: they end after their steps, or sooner where their caller has seen enough, on all ranks at the same step."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import nn

from tests.trainables.jobs import Recorded, config, no_telemetry, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.job import Job
from trainables.engine.omitted_part import RepeatedTeacher
from trainables.engine.train import build, run_job
from trainables.teachers.network import TeacherNetwork

TIMING = {"log_every": 4, "warmup_steps": 2, "max_steps": 30}


def timed(group: Group, settings: TrainConfig, most: int | None, pause_s: float = 0.0) -> tuple[dict[str, float], list[float]]:
    """The summary and the times of the steps; with `most`, whoever asks says, after a pause, that so many steps are enough."""

    def is_done(steps_s: Sequence[float]) -> bool:
        assert group.is_main
        time.sleep(pause_s)
        return len(steps_s) >= (most or 0)

    stop: Callable[[Sequence[float]], bool] | None = None if most is None else is_done
    with contextlib.closing(build(settings, group, Recorded(), no_telemetry, stop_early=stop)) as job:
        summary = run_job(job)
        return summary, job.metrics.timer.past_warmup.steps_s()


def test_a_timing_run_measures_all_its_steps_where_nobody_says_that_fewer_are_enough(tmp_path: Path) -> None:
    summary, steps_s = timed(Group(0, 1, 0), config(tmp_path, train=TIMING, teacher=None), None)
    assert len(steps_s) == 30
    assert summary["steps"] == 32
    assert summary["steady_steps"] == 30
    assert 0.5 < sum(steps_s) / 30 / summary["step_s"] <= 1.001


def test_the_loaders_costs_are_those_past_the_warm_up_and_no_sum_has_a_graph(tmp_path: Path) -> None:
    settings = config(tmp_path, train=TIMING, teacher=None)
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
        run_job(job)
        assert 28 <= job.train_loader.costs._batches <= 31
        assert not job.train_state.sums.values_N.requires_grad


def test_asking_whether_it_is_enough_is_no_part_of_a_steps_time(tmp_path: Path) -> None:
    settings = config(tmp_path, train=TIMING, teacher=None)
    summary, steps_s = timed(Group(0, 1, 0), settings, 1000, pause_s=0.25)
    assert summary["steps"] == 32
    assert summary["step_s"] < sum(steps_s) / 30 + 0.25 * 0.2  # it was asked every fourth step


def test_a_timing_run_ends_at_the_first_log_line_where_it_is_enough(tmp_path: Path) -> None:
    summary, steps_s = timed(Group(0, 1, 0), config(tmp_path, train=TIMING, teacher=None), 7)
    assert len(steps_s) == 10  # 2 to warm up, and logged after 4, 8 and 12
    assert summary["steps"] == 12


def test_all_ranks_end_at_the_same_step(tmp_path: Path, ranks: RankPool) -> None:
    answers = ranks.run(2, timed, config(tmp_path, train=TIMING, teacher=None), 7)
    assert [summary["steps"] for summary, _ in answers] == [12, 12]


def test_cost_is_the_epochs_time_on_all_workers(tmp_path: Path, ranks: RankPool) -> None:
    for summary, _ in ranks.run(2, timed, config(tmp_path, train=TIMING, teacher=None), None):
        assert summary["gpu_s_per_epoch"] == pytest.approx(2 * summary["epoch_s"])


def test_steps_without_loading_or_without_the_teacher_do_without_it(tmp_path: Path) -> None:
    def numbers(omitted: str | None) -> tuple[int, int]:
        """Batches that were read after the warm-up, and forward passes of the teacher."""
        settings = config(tmp_path, train=TIMING, teacher={"weights": write_teacher(tmp_path / "teacher.safetensors")})
        settings = settings.model_copy(update={"omitted": omitted})
        with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
            passes = list[int]()
            for network in teachers_of(job):
                network.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
            summary = run_job(job)
            assert summary["steps"] == 32
            assert math.isfinite(summary["phase/step_ms"])
            return job.train_loader.costs._batches, len(passes)

    for omitted in (None, "nothing"):
        num_batches, num_passes = numbers(omitted)
        assert num_batches >= 28
        assert num_passes >= 32
    num_batches, num_passes = numbers("loading")
    assert num_batches < 10
    assert num_passes >= 32
    assert numbers("teacher")[1] <= 2  # of a whole batch, and of an epoch's last one


def teachers_of(job: Job) -> list[nn.Module]:
    teacher = job.train_state.teacher
    network = teacher.teacher if isinstance(teacher, RepeatedTeacher) else teacher
    assert isinstance(network, TeacherNetwork)
    return list(network.networks)


def parameter_sum(group: Group, settings: TrainConfig) -> float:
    with contextlib.closing(build(settings, group, Recorded(), no_telemetry)) as job:
        run_job(job)
        return float(sum(parameter.detach().sum() for parameter in job.student.parameters()))


def test_steps_without_all_reduce_train_each_rank_alone(tmp_path: Path, ranks: RankPool) -> None:
    settings = config(tmp_path, train=TIMING, teacher=None)
    assert len(set(ranks.run(2, parameter_sum, settings))) == 1
    assert len(set(ranks.run(2, parameter_sum, settings.model_copy(update={"omitted": "allreduce"})))) == 2
