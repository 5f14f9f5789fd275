"""A job's records, which leave a worker in three ways.

Rank 0 sends them to the recorder of the run's log and sets Ray's gauges (Prometheus, Grafana); where a scheduler may end the job
after an epoch, all ranks call `ray.train.report` there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train

from trainables.config import TrainConfig
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.rundir import final_names
from trainables.stage_result import StageResult
from trainables.worker.gauges import Gauge
from trainables.worker.recorder import RunRecorder

GAUGES = {
    "train/images_per_s": ("raydistill_images_per_s", "images trained on per second, over all workers, loader waits included"),
    "train/data_pct": ("raydistill_data_pct", "share of a step's time that waits for data, in percent"),
    "train/loss": ("raydistill_loss", "training loss"),
    "val/top1_pct": ("raydistill_top1_pct", "validation accuracy, in percent"),
}
"""Metric → its gauge and what that is."""


class Reporter:
    """The loop's `report`: events in the log, gauges, and Ray Train's own report of an epoch that a scheduler waits for.

    No step waits for an event: `disk` does, in its thread, and so writes a checkpoint once all events before it are durable.
    """

    def __init__(self, config: TrainConfig, recorder: RunRecorder, group: Group, disk: DiskWriter):
        self._config, self._recorder, self._group, self._disk = config, recorder, group, disk
        self._last: dict[str, Any] = {"step": 0, "epoch": 0.0}
        self._gauges: dict[str, Gauge] = {}
        if group.is_main:
            tags = {"stage": config.stage, **config.labels}
            for metric, (name, text) in GAUGES.items():
                self._gauges[metric] = Gauge(name, description=text, tag_keys=tuple(tags))
                self._gauges[metric].set_default_tags(tags)

    def report(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """See `trainables.metrics.report.Report`; every rank calls it for the kind `epoch`. A `summary` waits for `complete`.

        Raises Exception: why an earlier record could not be written.
        """
        if self._group.is_main:
            self._last = {"step": step, "epoch": epoch, "time_ms": time.time_ns() // 1_000_000}
            if kind != "summary":
                self._send(kind, metrics=metrics, **self._last)
            for name, gauge in self._gauges.items():
                if name in metrics:
                    gauge.set(metrics[name])
        if kind == "epoch" and self._config.report_each_epoch:
            self._disk.wait()  # Ray may end the trial at once, and the driver then reads its records
            ray.train.report({"epoch": epoch, "step": step, **final_names(metrics)})

    def saved(self, names: Sequence[str], step: int, epoch: float) -> None:
        """A checkpoint is written, in files of these names; called by the disk writer. Raises as `RunRecorder.send` does."""
        self._recorder.send("checkpoint", Path(self._config.output_dir), step=step, epoch=epoch, names=names)()

    def complete(self, config: TrainConfig, metrics: dict[str, float], **more: Any) -> StageResult:
        """The stage is over on every rank; returns its result once that is durable. Raises as `report` does.

        `config` has the precision that it was trained in; `more` are fields of `StageResult`.
        """
        about: dict[str, Any] = {name: getattr(config, name) for name in ("model", "precision", "precision_reason")}
        result = StageResult(**about, metrics=metrics, **more)
        if self._group.is_main:
            self._send("summary", **self._last, **result.model_dump())
            self._disk.wait()
        return result

    def _send(self, kind: str, **fields: Any) -> None:
        self._disk.check()
        self._disk.put(self._recorder.send(kind, Path(self._config.output_dir), **fields))
