"""A stage's `metrics.jsonl` as rank 0 writes it: durable lines, and each record once, however often a job is resumed.

The names of a record's numbers show its kind: `train/…` in a `step`, `val/…` and `epoch/…` in an `epoch`, plain names in
`start` and `summary`. So no name comes twice at one step, in this file or in a store that has numbers by name and step alone.
"""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any

from trainables.rundir import append_lines, read_lines


class MetricsFile:
    """A thread of its own writes and fsyncs the queued lines, so that a slow disk does not slow a step.

    Leaving the context waits until every line is written.
    """

    def __init__(self, path: Path, stage: str):
        self._path, self._stage = path, stage
        # After a resume from an older checkpoint the same steps come again, with the same numbers.
        self._recorded = {(line["kind"], line["step"]) for line in read_lines(path)}
        self._started = any(kind == "start" for kind, _ in self._recorded)
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write, name="records", daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self) -> MetricsFile:
        self._writer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._queue.put(None)
        self._writer.join()
        if kind is None:
            self._check()

    def add(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Queue a record unless the file has it already. A job's second `start` becomes a `resume` without numbers.

        Raises:
            Exception: an earlier line could not be written, and why.
        """
        self._check()
        if kind == "start" and self._started:
            kind, metrics = "resume", {}
        elif (kind, step) in self._recorded:
            return
        self._started |= kind == "start"
        self._recorded.add((kind, step))
        line = {"kind": kind, "stage": self._stage, "step": step, "epoch": epoch}
        self._queue.put({**line, "time_ms": time.time_ns() // 1_000_000, "metrics": metrics})

    def flush(self) -> None:
        """Wait until all queued records are on disk.

        Raises:
            Exception: one could not be written, and why.
        """
        self._queue.join()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        ended = False
        while not ended:
            lines = [self._queue.get()]
            while not self._queue.empty():  # no other thread takes from it
                lines.append(self._queue.get())
            ended = lines[-1] is None
            try:
                append_lines(self._path, [line for line in lines if line is not None])
            except BaseException as error:  # of any kind: the training thread raises it
                self._failure = error
            for _ in lines:
                self._queue.task_done()
