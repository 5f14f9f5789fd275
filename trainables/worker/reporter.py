"""A job's records, which leave a worker in three ways.

Rank 0 appends them to the stage's `metrics.jsonl` (read by the progress display and sent to MLflow) and sets Ray's gauges
(Prometheus, Grafana); where a scheduler may end the job after an epoch, all ranks call `ray.train.report` there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ray.train
from ray.util.metrics import Gauge

from trainables.config import TrainConfig
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.metrics.metrics_file import MetricsFile
from trainables.rundir import StageDir, final_names

GAUGES = {
    "train/images_per_s": ("raydistill_images_per_s", "images trained on per second, over all workers, loader waits included"),
    "train/data_pct": ("raydistill_data_pct", "share of a step's time that waits for data, in percent"),
    "train/loss": ("raydistill_loss", "training loss"),
    "val/top1_pct": ("raydistill_top1_pct", "validation accuracy, in percent"),
}
"""Metric → its gauge and what that is."""


class Reporter:
    """The loop's `report`: a durable record, gauges, and Ray Train's own report of an epoch that a scheduler waits for."""

    def __init__(
        self,
        config: TrainConfig,
        stage: StageDir,
        group: Group,
        disk: DiskWriter,
        publish: Callable[[Path], None] = lambda path: None,
    ):
        """`publish` brings a file of the stage to where the driver reads it; it may raise."""
        self._config, self._stage, self._disk, self._publish = config, stage, disk, publish
        self._file = MetricsFile(stage.metrics, config.stage, disk) if group.is_main else None
        self._gauges: dict[str, Gauge] = {}
        if self._file:
            tags = {"stage": config.stage, **config.labels}
            for metric, (name, text) in GAUGES.items():
                self._gauges[metric] = Gauge(name, description=text, tag_keys=tuple(tags))
                self._gauges[metric].set_default_tags(tags)

    def report(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """See `trainables.metrics.metrics_file.Report`; every rank calls it for the kind `epoch`.

        Raises Exception: why an earlier record could not be written.
        """
        if self._file:
            self._file.add(kind, step, epoch, metrics)
            for name, gauge in self._gauges.items():
                if name in metrics:
                    gauge.set(metrics[name])
        if kind == "epoch" and self._config.report_each_epoch:
            self._disk.wait()  # Ray may end the trial at once, and the driver then reads its records
            if self._file:
                self._publish(self._stage.metrics)
            ray.train.report({"epoch": epoch, "step": step, **final_names(metrics)})
