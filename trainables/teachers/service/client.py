"""The worker's client of a teacher service: the rows of a batch are requested while it waits for its step.

Shapes: B samples of this rank, b of them that one actor serves, C channels, H=W pixels.
"""

import asyncio
import contextlib
import copy
import logging
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainables.config import TrainConfig
from trainables.data.loader.loader import Batch, Loader
from trainables.device.tensor_format import tensor_format
from trainables.distributed.group import Group
from trainables.errors import ClusterError, TeacherServiceLostError
from trainables.methods.contract import ModelOutputs
from trainables.teachers.cache.key import cache_key, shared_key_parts
from trainables.teachers.interface import TeacherRequest
from trainables.teachers.rows import Columns, MethodReads, RowFormat, Rows, RowTeacher, format_of
from trainables.teachers.service.protocol import RowsRequest, ServedModel, TeacherConnection

log = logging.getLogger("raydistill")

PREFETCH_BATCHES = 4
"""Batches whose rows are requested before their step."""
RESPONSE_TIMEOUT_S = 600.0
"""Without a response for so long, whatever was restarted meanwhile, the training ends."""
_RETRY_S = 0.5


@dataclass
class _PendingBatch:
    """A batch whose rows were requested."""

    indices_B: NDArray[np.int64]
    response: Future[tuple[Rows, int]]
    """The rows, and for how many of them the network ran."""
    num_used: int = 0
    """Rows that steps have used, from the first on."""
    columns: Columns | None = None
    """On the device, once a step has waited for the response."""


class ServiceTeacher(RowTeacher):
    """Rows that a teacher service computes. A sample is always requested from the same connection."""

    def __init__(
        self,
        config: TrainConfig,
        group: Group,
        classes: tuple[str, ...],
        loader: Loader,
        connections: Sequence[TeacherConnection],
        reads: Mapping[str, MethodReads],
    ) -> None:
        """Every rank calls it. A timing run shares no rows with other jobs, since it measures what its own teacher costs.

        Raises DistillError: the teacher or the data cannot be read, or the workers read different images.
        """
        dtype = str(tensor_format(config)[0]).removeprefix("torch.")
        super().__init__(
            format_of(reads, RowFormat(len(classes), exact_logits=dtype)), reads, config, group.device, loader.source
        )
        if not connections:
            raise ValueError("a client of the teacher service without a connection to it")
        self._connections = tuple(connections)
        parts = shared_key_parts(config, group, loader, classes, self.row_format)
        suffix = "" if config.train.max_steps is None else f"-{config.labels.get('trial', config.stage)}"
        settings = config.model_copy(update={"teacher_sha256": parts["teacher"]["sha256"]}).model_dump(mode="json")
        self._model = ServedModel(cache_key(parts) + suffix, settings, classes, self.row_format)
        self._pending: deque[_PendingBatch] = deque()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop, self._closed = self._runner.get_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._runner.run, args=(self._closed.wait(),), name="teacher", daemon=True)
        self._thread.start()

    def prefetch(self, batches: Generator[Batch, None, None], epoch: int | None) -> Generator[Batch, None, None]:
        """See `TeacherInterface`. One batch more with each step, so that the first step does not wait until all are loaded."""
        self._pending.clear()
        waiting, num_yielded = deque[Batch](), 0
        with contextlib.closing(batches):
            for batch in batches:
                if len(batch.labels_B):
                    indices_B = batch.indices_B.numpy()
                    images_BHWC = batch.images_BCHW.permute(0, 2, 3, 1).numpy()
                    response = asyncio.run_coroutine_threadsafe(self._request(indices_B, images_BHWC, epoch), self._loop)
                    self._pending.append(_PendingBatch(indices_B, response))
                waiting.append(batch)
                if len(waiting) > min(PREFETCH_BATCHES, num_yielded + 1):
                    yield waiting.popleft()
                    num_yielded += 1
            while waiting:  # none is held longer than its step needs it
                yield waiting.popleft()

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """See `TeacherInterface`. Waits for the response where it is not there yet, but not for the device."""
        if request is None or not num_rows:
            return self._dummy_outputs(num_rows)
        pending = self._pending[0]
        rows = slice(pending.num_used, pending.num_used + num_rows)
        if not np.array_equal(pending.indices_B[rows], request.indices_B.numpy()):
            raise RuntimeError("teacher.service: a step has other samples than those whose rows were requested for it")
        if pending.columns is None:
            rows_B, num_computed = pending.response.result()
            self._num_computed += num_computed
            pending.columns = self.row_format.to_device(self._check(rows_B), self._device)
        pending.num_used += num_rows
        if pending.num_used == len(pending.indices_B):
            self._pending.popleft()
        return self._outputs({name: column[rows] for name, column in pending.columns.items()})

    def for_validation(self, loader: Loader) -> Self:
        """See `TeacherInterface`: a client of the same network. It is closed with this one."""
        client = copy.copy(self)
        client._model = self._model._replace(key=f"{self._model.key}-val")
        client._pending, client._source = deque(), loader.source
        return client

    def close(self) -> None:
        """Send no more requests."""
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()
        self._runner.close()

    async def _request(self, indices_B: NDArray[np.int64], images_BHWC: NDArray[np.uint8], epoch: int | None) -> tuple[Rows, int]:
        """The rows of a batch, each from the actor that serves its sample, and how many of them were computed for it."""
        rows_B, actors_B = np.empty(len(indices_B), self.row_format.row), indices_B % len(self._connections)
        parts = [np.flatnonzero(actors_B == number) for number in range(len(self._connections))]

        async def fetch(connection: TeacherConnection, rows_b: NDArray[np.intp]) -> int:
            part = images_BHWC if len(rows_b) == len(indices_B) else images_BHWC[rows_b]
            rows_B[rows_b], num_computed = await self._exchange(connection, indices_B[rows_b], part, epoch)
            return num_computed

        pairs = zip(self._connections, parts, strict=True)
        return rows_B, sum(await asyncio.gather(*(fetch(connection, rows_b) for connection, rows_b in pairs if len(rows_b))))

    async def _exchange(
        self, connection: TeacherConnection, indices_b: NDArray[np.int64], images_bHWC: NDArray[np.uint8], epoch: int | None
    ) -> tuple[Rows, int]:
        """The response of an actor, which may be restarted meanwhile.

        Raises:
            ClusterError: there was no response for too long.
            DistillError: the service cannot load the teacher.
        """
        lost = False
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                while True:
                    images = connection.put(images_bHWC)
                    try:
                        return await connection(RowsRequest(self._model, epoch, indices_b, images))
                    except TeacherServiceLostError as error:
                        if not lost:
                            log.warning("teacher.service: an actor is gone (%s): repeating the request until it is back", error)
                        lost = True
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError as error:
            raise ClusterError(
                f"teacher.service: no response for {RESPONSE_TIMEOUT_S:g} s: check that the cluster runs its "
                f"{len(self._connections)} actors, then `distill resume`; or set teacher.service to null"
            ) from error
