"""How much a loader slows a step: measured after the training, with the training's own loader."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainables.jobs import config, equal, no_telemetry
from trainables.data.loader.sample_reader import ReadResult
from trainables.distributed.group import Group
from trainables.engine import loading_slowdown as measured
from trainables.engine import loop
from trainables.engine.job import Job, build
from trainables.engine.loading_slowdown import loading, loading_slowdown
from trainables.errors import DataError

SIZE = 8


@pytest.fixture(params=[{"loader_workers": 1}, {"loader_workers": 0}, {"loader_workers": 1, "loader": "process"}])
def any_job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    with contextlib.closing(a_job(tmp_path, **request.param)) as job:
        yield job


def a_job(folder: Path, **data: Any) -> Job:
    settings = config(folder, data={"global_batch_size": 16, **data}, train={"max_steps": 2, "warmup_steps": 1})
    return build(settings, Group(), lambda *_: None, no_telemetry)


def slowdown(job: Job, work: Callable[[], None]) -> float:
    """That of a loader which does this for each part of a batch."""
    reader = job.train_loader._reader.samples  # type: ignore[union-attr]
    fill = reader.fill

    def fill_slowly(*arguments: Any) -> Any:
        work()
        return fill(*arguments)

    reader.fill = fill_slowly  # type: ignore[method-assign]
    found = loading_slowdown(job.train_state, SIZE, 16, job.train_loader, 0)
    reader.fill = fill  # type: ignore[method-assign]
    return found


def compute() -> None:
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass


@pytest.mark.processes
def test_a_loader_slows_a_step_by_what_it_computes_and_not_by_what_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_ROUND_S", 0.3)  # in which the beginning of an epoch is lost
    with contextlib.closing(a_job(tmp_path, loader_workers=1)) as job:
        computing, waiting = slowdown(job, compute), slowdown(job, lambda: time.sleep(0.5))
    assert computing > 1.3 * waiting  # it has Python's lock most of the time


def test_the_loader_works_inside_and_stands_still_afterwards(any_job: Job) -> None:
    loader = any_job.train_loader
    drawn, add = threading.Event(), loader.costs.add

    def added(images: int, parts: list[ReadResult], wait_s: float) -> None:
        add(images, parts, wait_s)
        if loader.costs._batches > 2 * loader.steps_per_epoch:  # it begins again at the end of the epoch
            drawn.set()

    loader.costs.add = added  # type: ignore[method-assign]
    with loading(loader, 0):
        drawn.wait()
    count = loader.costs._batches
    assert len(list(loader.epoch(0))) == loader.steps_per_epoch
    assert loader.costs._batches == count + loader.steps_per_epoch


def test_it_is_on_record_and_changes_no_parameter(any_job: Job) -> None:
    summary = loop.run(any_job)
    assert summary["passes/loading_slowdown"] > 0
    before = {name: tensor.clone() for name, tensor in any_job.student.state_dict().items()}
    loading_slowdown(any_job.train_state, SIZE, 16, any_job.train_loader, 0)
    assert equal(before, any_job.student.state_dict())


def test_a_disk_that_fails_after_the_training_fails_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> float:
        raise DataError("data.path: 3.jpg cannot be read")

    monkeypatch.setattr("trainables.engine.metrics_records.loading_slowdown", fail)
    with contextlib.closing(a_job(tmp_path, loader_workers=1)) as job, caplog.at_level("WARNING", logger="raydistill"):
        summary = loop.run(job)
    assert summary["steps"] == 3
    assert "passes/loading_slowdown" not in summary
    assert "its passes are not all timed: DataError: data.path: 3.jpg cannot be read" in caplog.text
