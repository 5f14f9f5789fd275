"""The networks that a teacher service has loaded, each with a memory of the logits that it computed.

Shapes: N samples of the training split.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trainables.teachers.service.compute_thread import Network
from trainables.teachers.service.logits_memory import LogitsMemory

MEMORY_BYTES = 1 << 30
"""Logits in memory of each network: 20 million images of 10 classes, 267,000 of 1000. Students of a sweep that run side by side
need those of the steps between them."""
IDLE_TIMEOUT_S = 300.0
"""A network without a request for so long is dropped with its logits when another one is opened."""

Build = Callable[[dict[str, Any], Sequence[str]], Network]
"""Makes a network from a worker's settings and the classes."""


@dataclass(eq=False)
class LoadedTeacher:
    """A network with its logits."""

    network: Network
    memory: LogitsMemory
    requested_s: float
    """Of the last request, on the monotonic clock."""
    num_active: int = 0
    """Computations and uploads under way."""


class LoadedTeachers:
    """Networks by the part of a key that identifies them: what follows a `-` separates the logits of one run."""

    def __init__(self, build: Build, lock: threading.Lock, *, memory_bytes: int, idle_timeout_s: float) -> None:
        """Each network has `memory_bytes` for its logits. `lock` guards the networks; who calls `requested` holds it."""
        self._build, self._lock = build, lock
        self._memory_bytes, self._idle_timeout_s = memory_bytes, idle_timeout_s
        self._teachers: dict[str, LoadedTeacher] = {}
        self._opening: dict[str, Future[None]] = {}
        self._pool = ThreadPoolExecutor(thread_name_prefix="load")

    def open(self, key: str, settings: dict[str, Any], classes: Sequence[str], num_samples: int) -> Future[None]:
        name, _, _ = key.partition("-")
        with self._lock:
            opening = self._opening.get(name)
            if opening is None or opening.cancelled() or (opening.done() and opening.exception() is not None):
                opening = self._opening[name] = self._pool.submit(self._load, name, settings, classes, num_samples)
            return opening

    def requested(self, key: str) -> LoadedTeacher | None:
        """The network of a request that is there now; None: it is not loaded."""
        teacher = self._teachers.get(key.partition("-")[0])
        if teacher is not None:
            teacher.requested_s = time.monotonic()
        return teacher

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, name: str, settings: dict[str, Any], classes: Sequence[str], num_samples: int) -> None:
        with self._lock:
            self._drop_idle()  # first: the device may have room for one network alone
        network = self._build(settings, classes)
        memory = LogitsMemory(self._memory_bytes, num_samples, network.num_classes, network.dtype)
        with self._lock:
            self._teachers[name] = LoadedTeacher(network, memory, time.monotonic())

    def _drop_idle(self) -> None:
        """Drop teachers without a request for long: trials with other seeds have networks and logits of their own."""
        since_s = time.monotonic() - self._idle_timeout_s
        idle = [name for name, teacher in self._teachers.items() if teacher.requested_s < since_s and not teacher.num_active]
        for name in idle:
            del self._teachers[name], self._opening[name]
