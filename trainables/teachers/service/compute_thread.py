"""The thread of a service that runs its networks: what waits is computed together, and a GPU never waits for its next batch.

Shapes: n images of one job, or of several together, H=W pixels, C=3 channels, K classes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Network(Protocol):
    """A teacher as a service runs it."""

    num_classes: int
    dtype: np.dtype[Any]
    """Of its logits."""

    def begin(self, images: Sequence[NDArray[np.uint8]], samples_n: NDArray[np.int64], epoch: int) -> Callable[[], NDArray[Any]]:
        """Begin to answer images that come in parts (·, H, W, C), n in all; the call that this returns waits for their (n, K).

        On a GPU the work is launched at once, on a CPU it is done when it is waited for.
        """


@dataclass(eq=False)
class Job:
    """Images that a network is to answer, and who is told, by the thread; `failed` also where `answered` fails."""

    network: Network
    epoch: int
    samples_n: NDArray[np.int64]
    images_nHWC: NDArray[np.uint8]
    answered: Callable[[NDArray[Any]], None]
    """With the logits (n, K)."""
    failed: Callable[[Exception], None]


class Computer:
    """Jobs in the order in which they came. A network that fails fails its jobs, and the next ones are tried."""

    def __init__(self) -> None:
        self._most_rows = 1
        """Images that are computed together at most: as many as one worker has sent at once, and memory has held."""
        self._change = threading.Condition()
        self._queue: deque[Job] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="teacher", daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        """Have it computed."""
        with self._change:
            self._queue.append(job)
            self._change.notify()

    def close(self) -> None:
        """End the thread; jobs that wait are forgotten."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    def _work(self) -> None:
        """While a GPU computes, what comes next is launched behind it; only then is the first waited for."""
        running: Callable[[], None] | None = None
        while True:
            jobs = self._next(wait=running is None)
            if not jobs and running is None:
                return
            following = self._begin(jobs) if jobs else None
            if running is not None:
                running()
            running = following

    def _next(self, *, wait: bool) -> list[Job]:
        """The oldest job, and others of its network and epoch with it. None: there is none now, or this is closed."""
        with self._change:
            while wait and not self._queue and not self._closed:
                self._change.wait()
            if not self._queue or self._closed:
                return []
            jobs, left = [self._queue.popleft()], deque[Job]()
            rows = len(jobs[0].samples_n)
            for job in self._queue:
                alike = job.network is jobs[0].network and job.epoch == jobs[0].epoch
                if alike and rows + len(job.samples_n) <= self._most_rows:
                    jobs.append(job)
                    rows += len(job.samples_n)
                else:
                    left.append(job)
            self._queue = left
            return jobs

    def _begin(self, jobs: list[Job]) -> Callable[[], None]:
        """Begin the work of these; what this returns waits for it, and tells those who wait."""
        samples_n, epoch = np.concatenate([job.samples_n for job in jobs]), jobs[0].epoch
        try:
            result = jobs[0].network.begin([job.images_nHWC for job in jobs], samples_n, epoch)
        except Exception as error:
            return partial(_fail, jobs, error)

        def finish() -> None:
            try:
                logits_nK = result()
            except Exception as error:
                _fail(jobs, error)
                return
            self._most_rows = max(self._most_rows, *(len(job.samples_n) for job in jobs))
            ends = np.cumsum([len(job.samples_n) for job in jobs])[:-1]
            for job, mine_nK in zip(jobs, np.split(logits_nK, ends), strict=True):
                try:
                    job.answered(mine_nK)
                except Exception as error:  # of this job alone: the thread has others
                    job.failed(error)

        return finish


def _fail(jobs: Sequence[Job], error: Exception) -> None:
    for job in jobs:
        job.failed(error)
