"""The worker's side of a teacher's service: batches are asked about while they wait for their step.

Shapes: B samples of this rank, b of them that one service answers, C channels, H=W pixels, K classes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.data.loader import Batch
from trainables.errors import ClusterError, TeacherServiceLostError
from trainables.methods.contract import ModelOutputs
from trainables.teachers.interface import TeacherRequest
from trainables.teachers.service.protocol import Line, Question, Reply

log = logging.getLogger("raydistill")

AHEAD = 4
"""Batches that a worker has asked about before their step: so many answers may be on their way, and no more."""
PATIENCE_S = 600.0
"""A question that is not answered for so long, whatever was started again meanwhile, ends the training."""
_POLL_S, _PAUSE_S = 1.0, 0.5


@dataclass
class _Part:
    """Rows of a batch that one service answers."""

    rows_b: NDArray[np.intp]
    reply: Future[Reply]


@dataclass
class _Coming:
    """A batch that was asked about."""

    samples_B: NDArray[np.int64]
    parts: list[_Part]
    given: int = 0
    """Rows that steps have taken."""
    logits_BK: Tensor | None = None


class ServiceTeacher:
    """Answers that a service computes, see `TeacherInterface`. A sample is always asked of the same one of several lines."""

    def __init__(
        self, lines: Sequence[Line], key: str, settings: dict[str, Any], classes: Sequence[str], num_samples: int,
        methods: Sequence[str], *, device: torch.device, dtype: torch.dtype, patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        """`key`, `settings`, `classes`, `num_samples`: see `Service.open`. `methods`: who reads the answers."""
        if not lines:
            raise ValueError("a teacher's service without a line to it")
        self._lines, self._key, self._patience_s = tuple(lines), key, patience_s
        self._about = settings, tuple(classes), num_samples
        self._methods, self._device, self._dtype = tuple(methods), device, dtype
        self._coming: deque[_Coming] = deque()
        self._pool = ThreadPoolExecutor((AHEAD + 1) * len(lines), thread_name_prefix="teacher")
        self._closed = threading.Event()
        self._ran_for = 0

    def ahead(self, batches: Generator[Batch, None, None], epoch: int) -> Generator[Batch, None, None]:
        """See `TeacherInterface`. One more with each step, up to AHEAD: the first step does not wait until so many are loaded."""
        self._coming.clear()
        waiting, given = deque[Batch](), 0
        with contextlib.closing(batches):
            for batch in batches:
                self._coming.append(self._ask(batch, epoch))
                waiting.append(batch)
                if len(waiting) > min(AHEAD, given + 1):
                    yield waiting.popleft()
                    given += 1
            yield from waiting

    def __call__(self, images_BCHW: Tensor, num_rows: int, asked: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """See `TeacherInterface`. Waits for the answer where it is not there yet, but not for the device."""
        if asked is None:
            logits_BK = torch.zeros((num_rows, len(self._about[1])), device=self._device, dtype=self._dtype)
            return {method: ModelOutputs(logits_BK) for method in self._methods}
        coming = self._coming[0]
        rows = slice(coming.given, coming.given + num_rows)
        if not np.array_equal(coming.samples_B[rows], asked.samples_B.numpy()):
            raise RuntimeError("teacher.service: a step asks about other samples than those that came before it")
        if coming.logits_BK is None:
            coming.logits_BK = self._collect(coming)
        coming.given += num_rows
        if coming.given == len(coming.samples_B):
            self._coming.popleft()
        logits_BK = coming.logits_BK[rows]
        return {method: ModelOutputs(logits_BK) for method in self._methods}

    def end_epoch(self) -> int:
        """See `TeacherInterface`: images of which this worker was the first to ask."""
        ran_for, self._ran_for = self._ran_for, 0
        return ran_for

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, batch: Batch, epoch: int) -> _Coming:
        samples_B = batch.indices_B.numpy().copy()
        images_BHWC = batch.images_BCHW.permute(0, 2, 3, 1).numpy()
        whose_B = samples_B % len(self._lines)
        parts = []
        for number, line in enumerate(self._lines):
            rows_b = np.flatnonzero(whose_B == number)
            if len(rows_b):
                reply = self._pool.submit(self._learn, line, samples_B[rows_b], images_BHWC, rows_b, epoch)
                parts.append(_Part(rows_b, reply))
        return _Coming(samples_B, parts)

    def _collect(self, coming: _Coming) -> Tensor:
        """The logits (B, K) of a batch, on the device; on a GPU their copy is on its way."""
        pinned = self._device.type == "cuda"
        shape = len(coming.samples_B), len(self._about[1])
        logits_BK = torch.empty(shape, dtype=self._dtype, pin_memory=pinned)
        for part in coming.parts:
            reply = part.reply.result()
            logits_BK.numpy()[part.rows_b] = reply.logits_BK
            self._ran_for += reply.computed
        return logits_BK.to(self._device, non_blocking=True)

    def _learn(
        self, line: Line, samples_b: NDArray[np.int64], images_BHWC: NDArray[np.uint8], rows_b: NDArray[np.intp], epoch: int
    ) -> Reply:
        """The answer to some samples of a batch. First without images; then with those that the service has not seen.

        Raises:
            ClusterError: there was none for too long.
            DistillError: the service cannot load the teacher.
        """
        until_s, computed, lost = time.monotonic() + self._patience_s, 0, False
        sent_b = np.zeros(len(samples_b), dtype=bool)
        while True:
            sent = np.flatnonzero(sent_b)
            images = None if not len(sent) else images_BHWC if len(sent) == len(images_BHWC) else images_BHWC[rows_b[sent]]
            try:
                reply: Reply = self._wait(line("answer", Question(self._key, epoch, samples_b, sent, images)), until_s)
                computed += reply.computed
                if reply.logits_BK is not None:
                    return reply._replace(computed=computed)
                if reply.wanted is None:
                    self._wait(line("open", self._key, *self._about), until_s)
                    sent_b[:] = False
                else:
                    sent_b[reply.wanted] = True
            except TeacherServiceLostError as error:
                if self._closed.is_set():
                    raise
                if time.monotonic() >= until_s:
                    raise ClusterError(self._gave_up()) from error
                if not lost:
                    log.warning("teacher.service: an actor is gone (%s): asking again until it is back", error)
                lost = True
                self._closed.wait(_PAUSE_S)

    def _wait(self, result: Callable[[float], Any], until_s: float) -> Any:
        while not self._closed.is_set():
            try:
                return result(_POLL_S)
            except TimeoutError as error:
                if time.monotonic() >= until_s:
                    raise ClusterError(self._gave_up()) from error
        raise TeacherServiceLostError("the training is over")

    def _gave_up(self) -> str:
        return (
            f"teacher.service: no answer for {self._patience_s:g} s: see that the cluster holds its {len(self._lines)} actors, "
            "then `distill resume`; or set teacher.service to null"
        )
