"""Jobs of the process tier: what a worker or a driver does, without Ray, in a process with a fault point."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from trainables.metrics.metrics_file import MetricsFile

from service.tracking import Tracker
from tests.faults.storm.fault_points import FaultPoint, watch_writes
from tests.trainables.jobs import no_telemetry, record
from trainables.config import FillConfig, TrainConfig
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.distributed.pipeline.layout import build_layout
from trainables.engine.job_parts import open_loaders
from trainables.engine.modules import build_cached_teacher
from trainables.engine.train import build, run_job
from trainables.rundir import RunDir, StageDir
from trainables.stage_result import StageResult, write_stage_result
from trainables.teachers.cache.fill import fill, sequential

NUM_STEPS = 60
"""Records of a delivery."""
KEY = "train"


def train(group: Group, disk: Path, settings: TrainConfig, points: list[FaultPoint | None]) -> Counter[str]:
    """Train a stage to its end, as `trainables.worker.entry_points.train_stage` does; returns the writes by kind of file."""
    counts = watch_writes(disk, points[group.rank])
    stage = StageDir(Path(settings.output_dir))
    with DiskWriter() as disk_writer:
        report = record(stage, settings, disk_writer) if group.is_main else ignore
        with contextlib.closing(build(settings, group, report, no_telemetry, disk=disk_writer)) as job:
            summary = run_job(job)
    if group.world_size > 1:
        dist.barrier()
    if group.is_main:
        write_stage_result(stage, StageResult(stage=settings.stage, model=settings.model, metrics=summary))
    return counts


def fill_cache(group: Group, disk: Path, settings: TrainConfig, points: list[FaultPoint | None]) -> Counter[str]:
    """Fill a teacher's cache, as `distill cache` does."""
    counts = watch_writes(disk, points[group.rank])
    config = sequential(FillConfig.model_validate(settings.model_dump()))
    classes, (loader, val_loader) = open_loaders(config, build_layout(group, 1))
    with contextlib.closing(loader), contextlib.closing(val_loader):
        metrics = fill(config, group, build_cached_teacher(config, group, classes, loader), loader, ignore)
    if group.is_main:
        write_stage_result(StageDir(Path(settings.output_dir)), StageResult(stage="cache", metrics=metrics))
    return counts


def deliver(group: Group, disk: Path, uri: str, name: str, points: list[FaultPoint | None]) -> Counter[str]:
    """A run's driver: begin a run, follow a stage that writes records, end the run; to an MLflow store at `uri`.

    The second time it says all of it again, as a resumed driver does.
    """
    counts = watch_writes(disk, points[group.rank])
    os.setpriority = lambda *_: None  # on a busy machine the lowest priority never comes to run
    run_dir = RunDir(disk / name)
    tracker = Tracker(run_dir, uri, "storm", poll_s=0.01)
    tracker.start_run(KEY, name, params={"seed": 1})
    tracker.follow(KEY, run_dir.stage("student").metrics, "")
    tracker.start()
    with DiskWriter() as disk_writer:
        file = MetricsFile(run_dir.stage("student").metrics, "student", disk_writer)
        file.add("start", 0, 0.0, {"epochs": 1})
        for step in range(1, NUM_STEPS + 1):
            file.add("epoch", step, step, numbers(step))
            if step % 10 == 0:
                disk_writer.wait()
    tracker.metrics(KEY, NUM_STEPS, {"top1_pct": 50.0}, time_ms=1_700_000_000_000)
    tracker.end_run(KEY, "FINISHED")
    tracker.close(2.0 if points[group.rank] else 400.0)
    return counts


def numbers(step: int) -> dict[str, float]:
    """The metrics of an epoch of `deliver`."""
    return {"epoch/train/loss": 1 / step, "epoch/images_per_s": 0.1}


def ignore(*_: Any, **__: Any) -> None:
    """The report of a rank that has no records."""
