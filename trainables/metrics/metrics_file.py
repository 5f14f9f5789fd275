"""A stage's `metrics.jsonl` as rank 0 writes it: durable lines, and each record once, however often a job is resumed.

The names of a record's numbers show its kind: `train/…` in a `step`, `val/…` and `epoch/…` in an `epoch`, plain names in
`start` and `summary`. So no name comes twice at one step, in this file or in a store that has numbers by name and step alone.
"""

import time
from pathlib import Path
from typing import Protocol

from trainables.disk_writer import DiskWriter
from trainables.rundir import read_lines


class Report(Protocol):
    """Records numbers. `kind`: `start`, `step` (a log line), `epoch` (every rank calls it), `summary`."""

    def __call__(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None: ...


class MetricsFile:
    """The lines of one stage; `disk` appends and fsyncs them, behind what was put into it before."""

    def __init__(self, path: Path, stage: str, disk: DiskWriter):
        self._path, self._stage, self._disk = path, stage, disk
        # After a resume from an older checkpoint the same steps come again, with the same numbers.
        self._recorded = {(line["kind"], line["step"]) for line in read_lines(path)}
        self._started = any(kind == "start" for kind, _ in self._recorded)

    def add(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Queue a record, unless the file has it already. A job's second `start` becomes a `resume` without numbers.

        Raises Exception: an earlier write to the disk has failed, and why.
        """
        if kind == "start" and self._started:
            kind, metrics = "resume", {}
        elif (kind, step) in self._recorded:
            self._disk.check()
            return
        self._started |= kind == "start"
        self._recorded.add((kind, step))
        line = {"kind": kind, "stage": self._stage, "step": step, "epoch": epoch}
        self._disk.put_line(self._path, {**line, "time_ms": time.time_ns() // 1_000_000, "metrics": metrics})
