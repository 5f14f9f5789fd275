"""The thread of a teacher service that runs its networks: what waits is computed together, and a GPU has its next batch queued.

Shapes: n images of one task, or of several together, H=W pixels, C=3 channels, K classes.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Network(Protocol):
    """A teacher network as a service runs it."""

    num_classes: int
    dtype: np.dtype[Any]
    """Of its logits."""

    def launch(self, images: Sequence[NDArray[np.uint8]], samples_n: NDArray[np.int64], epoch: int) -> Callable[[], NDArray[Any]]:
        """Begin a forward pass over images in several arrays (·, H, W, C), n in all; the result waits for the logits (n, K).

        On a GPU the work is launched at once, on a CPU it is done when it is waited for.
        """


@dataclass(eq=False)
class ComputeTask:
    """Images for a network, and the callbacks that the thread calls; `on_error` also where `on_logits` raises."""

    network: Network
    epoch: int
    samples_n: NDArray[np.int64]
    images_nHWC: NDArray[np.uint8]
    on_logits: Callable[[NDArray[Any]], None]
    """Called with the logits (n, K)."""
    on_error: Callable[[Exception], None]


class ComputeThread:
    """Runs tasks in the order of their arrival. A network that raises fails its tasks, and the next ones are tried."""

    def __init__(self) -> None:
        self._max_rows = 1
        """Images that are computed together at most: the largest task that one worker has sent and that fitted into memory."""
        self._changed = threading.Condition()
        self._queue: deque[ComputeTask] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="teacher", daemon=True)
        self._thread.start()

    def add(self, task: ComputeTask) -> None:
        with self._changed:
            self._queue.append(task)
            self._changed.notify()

    def close(self) -> None:
        """End the thread; queued tasks are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """While a GPU computes, the next tasks are launched behind it; only then the first are waited for."""
        finish: Callable[[], None] | None = None
        while True:
            tasks = self._next(wait=finish is None)
            if not tasks and finish is None:
                return
            following = self._launch(tasks) if tasks else None
            if finish is not None:
                finish()
            finish = following

    def _next(self, *, wait: bool) -> list[ComputeTask]:
        """The oldest task, and others of its network and epoch with it; empty where none is queued, or after `close`."""
        with self._changed:
            while wait and not self._queue and not self._closed:
                self._changed.wait()
            if not self._queue or self._closed:
                return []
            tasks, remaining = [self._queue.popleft()], deque[ComputeTask]()
            num_rows = len(tasks[0].samples_n)
            for task in self._queue:
                matches = task.network is tasks[0].network and task.epoch == tasks[0].epoch
                if matches and num_rows + len(task.samples_n) <= self._max_rows:
                    tasks.append(task)
                    num_rows += len(task.samples_n)
                else:
                    remaining.append(task)
            self._queue = remaining
            return tasks

    def _launch(self, tasks: list[ComputeTask]) -> Callable[[], None]:
        """Launch the forward pass of tasks; the result waits for it and calls their callbacks."""
        samples_n, epoch = np.concatenate([task.samples_n for task in tasks]), tasks[0].epoch
        try:
            result = tasks[0].network.launch([task.images_nHWC for task in tasks], samples_n, epoch)
        except Exception as error:
            return partial(_fail, tasks, error)

        def finish() -> None:
            try:
                logits_nK = result()
            except Exception as error:
                _fail(tasks, error)
                return
            sizes = [len(task.samples_n) for task in tasks]
            self._max_rows = max(self._max_rows, *sizes)
            for task, task_logits_nK in zip(tasks, np.split(logits_nK, np.cumsum(sizes)[:-1]), strict=True):
                try:
                    task.on_logits(task_logits_nK)
                except Exception as error:  # of this task alone: the thread has others
                    task.on_error(error)

        return finish


def _fail(tasks: Sequence[ComputeTask], error: Exception) -> None:
    for task in tasks:
        task.on_error(error)
