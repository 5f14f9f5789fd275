"""The worker's client of a teacher service: the logits of a batch are requested while it waits for its step.

Shapes: B samples of this rank, b of them that one actor serves, C channels, H=W pixels, K classes.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.data.loader.loader import Batch
from trainables.errors import ClusterError, TeacherServiceLostError
from trainables.methods.contract import ModelOutputs
from trainables.teachers.interface import TeacherInterface, TeacherRequest
from trainables.teachers.service.protocol import NO_ROWS, LogitsRequest, LogitsResponse, TeacherConnection

log = logging.getLogger("raydistill")

PREFETCH_BATCHES = 4
"""Batches whose logits are requested before their step."""
RESPONSE_TIMEOUT_S = 600.0
"""Without a response for so long, whatever was restarted meanwhile, the training ends."""
_POLL_S, _RETRY_S = 1.0, 0.5


@dataclass
class _PendingBatch:
    """A batch whose logits were requested."""

    indices_B: NDArray[np.int64]
    responses: list[tuple[NDArray[np.intp], Future[LogitsResponse]]]
    """Rows of the batch, and the response for them; one for each connection."""
    num_used: int = 0
    """Rows that steps have used, from the first on."""
    logits_BK: Tensor | None = None
    """On the device, once a step has waited for the responses."""


class ServiceTeacher(TeacherInterface):
    """Logits that a teacher service computes. A sample is always requested from the same connection."""

    def __init__(
        self,
        connections: Sequence[TeacherConnection],
        *,
        template: LogitsRequest,
        methods: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        timeout_s: float = RESPONSE_TIMEOUT_S,
    ) -> None:
        """`template`: what all requests have in common. `methods`: their keys."""
        if not connections:
            raise ValueError("a client of the teacher service without a connection to it")
        self._connections, self._template, self._timeout_s = tuple(connections), template, timeout_s
        self._methods, self._device, self._dtype = tuple(methods), device, dtype
        self._pending: deque[_PendingBatch] = deque()
        self._pool = ThreadPoolExecutor((PREFETCH_BATCHES + 1) * len(connections), thread_name_prefix="teacher")
        self._closed = threading.Event()
        self._num_computed = 0

    def prefetch(self, batches: Generator[Batch, None, None], epoch: int) -> Generator[Batch, None, None]:
        """See `TeacherInterface`. One batch more with each step, so that the first step does not wait until all are loaded."""
        self._pending.clear()
        waiting, num_yielded = deque[Batch](), 0
        with contextlib.closing(batches):
            for batch in batches:
                self._pending.append(self._request(batch, epoch))
                waiting.append(batch)
                if len(waiting) > min(PREFETCH_BATCHES, num_yielded + 1):
                    yield waiting.popleft()
                    num_yielded += 1
            while waiting:  # none is held longer than its step needs it
                yield waiting.popleft()

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """See `TeacherInterface`. Waits for the responses where they are not there yet, but not for the device."""
        if request is None:
            return self._outputs(torch.zeros((num_rows, len(self._template.classes)), device=self._device, dtype=self._dtype))
        pending = self._pending[0]
        rows = slice(pending.num_used, pending.num_used + num_rows)
        if not np.array_equal(pending.indices_B[rows], request.indices_B.numpy()):
            raise RuntimeError("teacher.service: a step has other samples than those whose logits were requested for it")
        if pending.logits_BK is None:
            pending.logits_BK = self._collect(pending)
        pending.num_used += num_rows
        if pending.num_used == len(pending.indices_B):
            self._pending.popleft()
        return self._outputs(pending.logits_BK[rows])

    def for_validation(self) -> "ServiceTeacher":
        """A client of the same network for the validation images."""
        template = self._template._replace(key=f"{self._template.key}-val")
        options: dict[str, Any] = {"methods": self._methods, "device": self._device, "dtype": self._dtype}
        return ServiceTeacher(self._connections, template=template, timeout_s=self._timeout_s, **options)

    def end_epoch(self) -> int:
        """See `TeacherInterface`: images that this worker was the first to request."""
        num_computed, self._num_computed = self._num_computed, 0
        return num_computed

    def close(self) -> None:
        """Send no more requests."""
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _outputs(self, logits_BK: Tensor) -> dict[str, ModelOutputs]:
        return {method: ModelOutputs(logits_BK) for method in self._methods}

    def _request(self, batch: Batch, epoch: int) -> _PendingBatch:
        """Send the requests of a batch, each to the actor that serves its samples."""
        indices_B = batch.indices_B.numpy().copy()
        images_BHWC = batch.images_BCHW.permute(0, 2, 3, 1).numpy()
        actors_B = indices_B % len(self._connections)
        responses = []
        for number, connection in enumerate(self._connections):
            rows_b = np.flatnonzero(actors_B == number)
            if len(rows_b):
                exchange = partial(self._exchange, connection, indices_B[rows_b], images_BHWC, rows_b, epoch)
                responses.append((rows_b, self._pool.submit(exchange)))
        return _PendingBatch(indices_B, responses)

    def _collect(self, pending: _PendingBatch) -> Tensor:
        """Wait for the logits (B, K) of a batch; returns them on the device, on a GPU with their copy under way."""
        shape = len(pending.indices_B), len(self._template.classes)
        logits_BK = torch.empty(shape, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        for rows_b, future in pending.responses:
            response = future.result()
            logits_BK.numpy()[rows_b] = response.logits_BK
            self._num_computed += response.num_computed
        return logits_BK.to(self._device, non_blocking=True)

    def _exchange(
        self,
        connection: TeacherConnection,
        indices_b: NDArray[np.int64],
        images_BHWC: NDArray[np.uint8],
        rows_b: NDArray[np.intp],
        epoch: int,
    ) -> LogitsResponse:
        """The logits of some samples of a batch: requested without images first, then with those that the service lacks.

        Raises:
            ClusterError: there was no response for too long.
            DistillError: the service cannot load the teacher.
        """
        deadline_s, num_computed, lost = time.monotonic() + self._timeout_s, 0, False
        sent = NO_ROWS
        while True:
            images_RHWC = images_BHWC[rows_b[sent]] if len(sent) else None
            request = self._template._replace(epoch=epoch, indices_B=indices_b, rows_R=sent, images_RHWC=images_RHWC)
            try:
                response = self._wait(connection("logits", request), deadline_s)
            except TeacherServiceLostError as error:
                if self._closed.is_set():
                    raise
                if time.monotonic() >= deadline_s:
                    raise ClusterError(self._timeout_message()) from error
                if not lost:
                    log.warning("teacher.service: an actor is gone (%s): repeating the request until it is back", error)
                lost = True
                self._closed.wait(_RETRY_S)
                continue
            num_computed += response.num_computed
            if response.missing is None:
                return response._replace(num_computed=num_computed)
            sent = np.union1d(sent, response.missing)

    def _wait(self, result: Callable[[float], LogitsResponse], deadline_s: float) -> LogitsResponse:
        while not self._closed.is_set():
            try:
                return result(_POLL_S)
            except TimeoutError as error:
                if time.monotonic() >= deadline_s:
                    raise ClusterError(self._timeout_message()) from error
        raise TeacherServiceLostError("the training is over")

    def _timeout_message(self) -> str:
        return (
            f"teacher.service: no response for {self._timeout_s:g} s: check that the cluster runs its {len(self._connections)} "
            "actors, then `distill resume`; or set teacher.service to null"
        )
