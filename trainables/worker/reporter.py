"""A job's records, which leave a worker in three ways.

Rank 0 appends them to the stage's `metrics.jsonl` (read by the progress display and sent to MLflow) and sets Ray's gauges
(Prometheus, Grafana); at the end of an epoch all ranks call `ray.train.report`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import ray.train
from ray.util.metrics import Gauge

from trainables.config import TrainConfig
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group, gather_objects
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
    """The loop's `report`: a durable record, gauges, and Ray Train's own report at the end of an epoch."""

    def __init__(
        self,
        config: TrainConfig,
        stage: StageDir,
        group: Group,
        disk: DiskWriter,
        publish: Callable[[Path], None] = lambda path: None,
    ):
        """`publish` brings a file of the stage to where the driver reads it; it may raise."""
        self._config, self._stage, self._group, self._disk, self._publish = config, stage, group, disk, publish
        self._file = MetricsFile(stage.metrics, config.stage, disk) if group.is_main else None
        self._epochs = None if config.report_each_epoch else EpochReports(group)
        self._gauges: dict[str, Gauge] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Reporter:
        if self._file:
            tags = {"stage": self._config.stage, **self._config.labels}
            for metric, (name, text) in GAUGES.items():
                self._gauges[metric] = Gauge(name, description=text, tag_keys=tuple(tags))
                self._gauges[metric].set_default_tags(tags)
        if self._epochs:
            self._stack.enter_context(self._epochs)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def report(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """See `trainables.engine.job.Report`; every rank calls it for the kind `epoch`.

        Raises Exception: why an earlier record could not be written, or an earlier report did not reach Ray.
        """
        written = None
        if self._file:
            written = self._file.add(kind, step, epoch, metrics)
            for name, gauge in self._gauges.items():
                if name in metrics:
                    gauge.set(metrics[name])
        if kind != "epoch":
            return
        epoch_metrics = {"epoch": epoch, "step": step, **final_names(metrics)}
        if self._epochs:
            self._epochs.put(EpochReport(epoch_metrics, written))
        else:
            self._disk.wait()  # Ray may end the trial at once, and the driver then reads its records
            if self._file:
                self._publish(self._stage.metrics)
            ray.train.report(epoch_metrics)


class EpochReport(NamedTuple):
    """An epoch's metrics, and on rank 0 when its record is on disk, and so its checkpoint: it is reported after that."""

    metrics: dict[str, Any]
    written: Future[None] | None = None


class EpochReports:
    """Sends epochs' metrics to Ray Train from a thread: its report waits for all ranks and for the controller's next poll.

    An epoch that ends during an earlier one's report is not waited for: the next epoch replaces it. The last epoch is always
    reported: leaving the context waits for that, unless an exception ends the job.
    """

    def __init__(self, group: Group):
        self._group = group
        self._reports: queue.Queue[EpochReport | None] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._report, name="epoch reports", daemon=True)
        self._deferred: EpochReport | None = None
        """The last epoch, where no report of it has begun."""
        self._failure: BaseException | None = None

    def __enter__(self) -> EpochReports:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # other ranks may never call the report that this rank's thread waits in
            return
        if self._deferred is not None:
            self._reports.put(self._deferred)
        self._reports.put(None)
        self._thread.join()
        self._check()

    def put(self, report: EpochReport) -> None:
        """Report an epoch; every rank calls it."""
        self._check()
        # All ranks report the same epochs: one that left out an epoch would block the others in its report.
        if not all(gather_objects(self._idle.is_set(), self._group)):
            self._deferred = report
            return
        self._deferred = None
        self._idle.clear()
        self._reports.put(report)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _report(self) -> None:
        while True:
            report = self._reports.get()
            if report is None:
                return
            try:
                if report.written is not None:
                    report.written.result()
                ray.train.report(report.metrics)
            except BaseException as error:  # of any kind: the training thread raises it
                self._failure = error
            self._idle.set()
