"""Checkpoints by the clock, and stages that end on request: every rank decides the same after the same step."""

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, relative_difference, train
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint_writer
from trainables.engine.interruptions import Decision, Interruptions
from trainables.engine.train import build, run_job
from trainables.errors import Interruption, StageInterruptedError
from trainables.failures import failure_of

NEVER = 1e9
SMALL = {"teacher": None, "train": {"log_every": 1}}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def steps_that_save(interruptions: Interruptions, clock: Clock, num_steps: int, step_s: float) -> list[int]:
    found = []
    for step in range(1, num_steps + 1):
        clock.now_s += step_s
        if interruptions.after_step(step).saves:
            interruptions.saved()
            found.append(step)
    return found


def test_a_checkpoint_is_due_once_its_seconds_have_passed() -> None:
    clock = Clock()
    found = steps_that_save(Interruptions(Group(), 300.0, lambda: None, clock), clock, num_steps=1000, step_s=1.0)
    assert len(found) == 3
    assert all(300 <= later - earlier <= 305 for earlier, later in zip([0, *found], found, strict=False))


def test_a_log_line_is_due_where_thirty_seconds_have_passed_without_one() -> None:
    clock, found = Clock(), []
    interruptions = Interruptions(Group(), NEVER, lambda: None, clock)
    for step in range(1, 13):
        clock.now_s += 11.0
        if interruptions.after_step(step).logs or step == 5:  # the fifth for its number
            interruptions.logged()
            found.append(step)
    assert found == [3, 5, 8, 11]


def test_requests_are_exchanged_every_five_seconds_whatever_a_step_takes() -> None:
    clock, requests_s = Clock(), list[float]()
    interruptions = Interruptions(Group(), NEVER, lambda: requests_s.append(clock.now_s), clock)
    steps_that_save(interruptions, clock, num_steps=10_000, step_s=0.01)
    assert len(requests_s) < 10 + 100 / 5
    requests_s.clear()
    for step in range(10_001, 10_600):
        clock.now_s += 0.1
        interruptions.after_step(step)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(requests_s[1:])]
    assert max(gaps_s) <= 5.2


def write_slowly(*arguments: Any, write: Callable[..., None] = checkpoint_writer.write_packed) -> None:
    time.sleep(0.3)
    write(*arguments)


def end_after(group: Group, settings: TrainConfig, num_steps: int) -> list[int]:
    """Rank 1 alone requests the end once there were so many steps; returns the steps that this rank has made."""
    report = Recorded()

    def request() -> Interruption | None:
        return "preempted" if group.rank == 1 and job.progress.step >= num_steps else None

    job = build(settings, group, report, no_telemetry, interruption_request=request)
    job.interruptions.after_step = job.interruptions.exchange  # type: ignore[method-assign]
    with (
        contextlib.closing(job),
        patch.object(checkpoint_writer, "write_packed", write_slowly),
        pytest.raises(StageInterruptedError) as caught,
    ):
        run_job(job)
    assert job.stage.last.exists()  # also on the rank that does not write it
    assert failure_of(caught.value, group.rank).kind == "preempted"
    return [step for kind, step, _ in report.calls if kind == "step"]


def test_a_job_that_is_interrupted_on_one_rank_ends_on_all_and_goes_on_to_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(2, train, config(tmp_path / "whole", **SMALL))[0]
    settings = config(tmp_path / "pieces", **SMALL)
    assert ranks.run(2, end_after, settings, 7) == [list(range(1, 8))] * 2
    resumed = ranks.run(2, train, settings)[0]
    assert next(step for kind, step, _ in resumed["calls"] if kind == "step") == 8
    assert equal(whole["state"], resumed["state"])


def test_a_job_that_loses_a_worker_and_gains_one_ends_where_an_undisturbed_one_does(ranks: RankPool, tmp_path: Path) -> None:
    data = {"global_batch_size": 96}
    whole = ranks.run(3, train, config(tmp_path / "whole", **SMALL, data=data))[0]
    settings = config(tmp_path / "pieces", **SMALL, data=data)
    assert ranks.run(3, end_after, settings, 4)[0] == [1, 2, 3, 4]
    assert ranks.run(2, end_after, settings, 9)[0] == [5, 6, 7, 8, 9]
    resumed = ranks.run(3, train, settings)[0]
    assert relative_difference(whole["state"], resumed["state"]) < 1e-9
    steps = [values for kind, _, values in resumed["calls"] if kind == "step"]
    assert {values["train/num_workers"] for values in steps} == {3}


def test_checkpoints_by_the_clock_change_no_bit(tmp_path: Path) -> None:
    states = [
        train(Group(), config(tmp_path / str(every_s), teacher=None, train={"checkpoint_every_s": every_s}))["state"]
        for every_s in (1e-6, 1e6)
    ]
    assert equal(*states)


def test_nothing_is_decided_between_two_exchanges() -> None:
    interruptions = Interruptions(Group(), NEVER, lambda: "resized", Clock())
    assert interruptions.after_step(1) == Decision(saves=True, interruption="resized")
    assert interruptions.after_step(2) == Decision()
