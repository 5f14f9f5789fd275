"""Jobs of the process tier: what a worker or a driver does, without Ray, in a process with a fault point."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from service.config.experiment import load
from service.runs.event_log import EventLog
from service.runs.events import event
from service.runs.mlflow_view import MlflowView
from service.runs.run_directory import begin_run, has_begun
from service.tracking.sync import Syncing
from tests.faults.storm.fault_points import FaultPoint, watch_writes
from tests.run_log import LocalRecorder
from tests.trainables.jobs import no_telemetry
from trainables.config import FillConfig, TrainConfig
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.distributed.pipeline.layout import build_layout
from trainables.engine.job_parts import open_loaders
from trainables.engine.modules import build_cached_teachers
from trainables.engine.train import build, run_job
from trainables.rundir import RunDir
from trainables.teachers.cache.fill import fill, sequential
from trainables.worker.recorder import RunRecorder
from trainables.worker.reporter import Reporter

NUM_STEPS = 60
"""Records of a delivery."""
KEY = "train"


def train(group: Group, disk: Path, settings: TrainConfig, points: list[FaultPoint | None]) -> Counter[str]:
    """Train a stage to its end, as `trainables.worker.entry_points.train_stage` does; returns the writes by kind of file."""
    counts = watch_writes(disk, points[group.rank])
    with reporting(group, settings) as (reporter, disk_writer):

        def publish(paths: Sequence[Path], step: int, epoch: float) -> None:
            reporter.saved([path.name for path in paths], step, epoch)

        job = build(settings, group, reporter.report, no_telemetry, disk=disk_writer, publish=publish)
        with contextlib.closing(job):
            summary = run_job(job)
        if group.world_size > 1:
            dist.barrier()
        reporter.complete(settings, summary)
    return counts


def fill_cache(group: Group, disk: Path, settings: TrainConfig, points: list[FaultPoint | None]) -> Counter[str]:
    """Fill a teacher's cache, as `distill cache` does."""
    counts = watch_writes(disk, points[group.rank])
    config = sequential(FillConfig.model_validate(settings.model_dump()))
    with reporting(group, config) as (reporter, _):
        classes, (loader, val_loader) = open_loaders(config, build_layout(group, 1))
        with contextlib.closing(loader), contextlib.closing(val_loader):
            teachers = build_cached_teachers(config, group, classes, loader)
            metrics = fill(config, group, teachers, (loader, val_loader), reporter.report)
        reporter.complete(config, metrics)
    return counts


@contextlib.contextmanager
def reporting(group: Group, settings: TrainConfig) -> Iterator[tuple[Reporter, DiskWriter]]:
    """What records a stage in its run's log, which rank 0 writes itself."""
    run = Path(settings.output_dir).parent
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(contextlib.closing(EventLog(run / "events.jsonl"))) if group.is_main else None
        recorder = LocalRecorder(run, file) if file is not None else RunRecorder(None, str(run))
        disk = stack.enter_context(DiskWriter())
        yield Reporter(settings, recorder, group, disk), disk


def deliver(group: Group, disk: Path, uri: str, name: str, points: list[FaultPoint | None]) -> Counter[str]:
    """A run's driver: begin a run, follow a stage that writes records, end the run; to an MLflow store at `uri`.

    The second time it says all of it again, as a resumed driver does.
    """
    counts = watch_writes(disk, points[group.rank])
    os.setpriority = lambda *_: None  # on a busy machine the lowest priority never comes to run
    run_dir = RunDir(disk / name)
    if not has_begun(run_dir.root):
        begin_run(load("digits"), "train", run_dir, disk)
    syncing = Syncing(run_dir, uri, "storm", MlflowView, poll_s=0.01)
    with contextlib.closing(EventLog(run_dir.events)) as log:
        log.append([event("session_begun"), event("start", "student", step=0, epoch=0.0, metrics={"epochs": 1})])
        syncing.start()
        for step in range(1, NUM_STEPS + 1):
            log.append([event("epoch", "student", step=step, epoch=float(step), metrics=numbers(step))])
        summary = event("summary", "student", step=NUM_STEPS, epoch=1.0, metrics={"steps": NUM_STEPS, "top1_pct": 50.0})
        log.append([summary, event("session_ended", status="complete", reason="")])
    syncing.close(2.0 if points[group.rank] else 400.0)
    return counts


def numbers(step: int) -> dict[str, float]:
    """The metrics of an epoch of `deliver`."""
    return {"epoch/train/loss": 1 / step, "epoch/images_per_s": 0.1}
