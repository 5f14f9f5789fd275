"""The actor of a teacher service: a batcher in front of the networks, and a memory of the rows that they computed.

Rows are a function of key, epoch and sample, whoever requests them, however often and in whatever order. So a client that lost
a response repeats the request, and clients that request the same image at once wait for the same computation.

Shapes: B samples of a request, n images of one block, H=W pixels, C=3 channels.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.config import TrainConfig
from trainables.device.precision import set_matmul_precision
from trainables.errors import TeacherServiceLostError
from trainables.failures import kind_of
from trainables.object_store.stage_copy import fetch_inputs
from trainables.process_exit import skip_exit_handlers
from trainables.teachers.rows import Rows
from trainables.teachers.service.protocol import RowsRequest, RowsResponse, ServedModel
from trainables.teachers.service.served_network import ServedNetwork

MEMORY_BYTES = 1 << 30
"""Rows in memory: 3 million images of 10 classes, 250,000 of 1000; students side by side need those of a few steps."""
_ROW_BYTES = 300
"""A row's entry in the memory takes about so much besides its numbers."""
IDLE_TIMEOUT_S = 300.0
"""A network without a request for so long is dropped when another one is loaded, as trials with other seeds have their own."""
_CONCURRENT = 2
"""Batches under way: while a GPU computes one, the next is queued behind it."""

T = TypeVar("T")
RowKey = tuple[str, int, int]
"""Key, epoch, sample."""


class Network(Protocol):
    """A teacher as the actor runs it."""

    def launch(self, images: Sequence[NDArray[np.uint8]], samples_n: NDArray[np.int64], epoch: int) -> Callable[[], Rows]:
        """Begin a forward pass over images in several arrays (·, H, W, C), n in all; the result waits for the rows (n,)."""


Build = Callable[[dict[str, Any], Sequence[str]], Network]
"""Makes a network from a worker's settings and the classes."""


@dataclass(eq=False)
class _Block:
    """The rows of images that one client sent at once."""

    keys: list[RowKey]
    rows_n: asyncio.Future[Rows]

    @property
    def num_bytes(self) -> int:
        return self.rows_n.result().nbytes + _ROW_BYTES * len(self.keys)


class _Task(NamedTuple):
    """A block that waits for its network."""

    network: Network
    epoch: int
    images_nHWC: NDArray[np.uint8]
    block: _Block


class TeacherActor:
    """Serves the rows of several students, and computes each row once as long as its memory has it.

    All state belongs to the event loop; threads only build and run networks.
    """

    def __init__(
        self,
        device: str,
        threads: int,
        *,
        build: Build | None = None,
        memory_bytes: int = MEMORY_BYTES,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """`threads`: compute threads on a CPU. `build`: other networks than the experiment's."""
        self._device = torch.device(device)
        self._build = build or self._load
        self._memory_bytes, self._idle_timeout_s = memory_bytes, idle_timeout_s
        self._networks: dict[str, asyncio.Task[Network]] = {}
        self._requested_s: dict[str, float] = {}
        """When each network was last requested, on the monotonic clock."""
        self._rows: dict[RowKey, tuple[_Block, int]] = {}
        """The memory: the block where a row is, or will be, and its number in there."""
        self._computed, self._num_bytes = deque[_Block](), 0
        self._queue = deque[_Task]()
        self._tasks = set[asyncio.Task[None]]()
        self._num_computing = 0
        self._max_rows = 1
        """Images that are computed together at most: the largest block that one client sent and that fitted into memory."""
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="teacher")
        self._num_computed, self._num_returned = 0, 0
        skip_exit_handlers()
        torch.set_num_threads(threads)
        set_matmul_precision()

    async def rows(self, request: RowsRequest) -> RowsResponse:
        """See `RowsResponse`. Raises DistillError: the teacher cannot be loaded; TeacherServiceLostError: the images are lost."""
        network = await self._network(request.model)
        keys, num_computed = [(request.model.key, request.epoch, sample) for sample in request.indices_B.tolist()], 0
        while True:
            new = [number for number, key in enumerate(keys) if key not in self._rows]
            own = self._add(network, request, [keys[number] for number in new], new) if new else None
            num_computed += len(new)
            found = [self._rows[key] for key in keys]
            await asyncio.wait({block.rows_n for block, _ in found})
            try:
                rows_B = np.stack([block.rows_n.result()[row] for block, row in found])
            except TeacherServiceLostError:
                if own is not None and own.rows_n.exception():
                    raise
                continue  # another client, which has gone with its images: compute those of this one
            self._num_returned += len(keys)
            return RowsResponse(rows_B, num_computed)

    async def counts(self) -> dict[str, int]:
        """Images since the actor began: `computed` by the networks, and `returned` to clients."""
        return {"computed": self._num_computed, "returned": self._num_returned}

    async def _network(self, model: ServedModel) -> Network:
        """The network of a job, loaded where it is not there; after a failure the next request tries again."""
        name, now_s = model.key.partition("-")[0], time.monotonic()
        loading = self._networks.get(name)
        if loading is None or (loading.done() and loading.exception() is not None):
            for idle in [each for each in self._networks if self._requested_s[each] < now_s - self._idle_timeout_s]:
                del self._networks[idle]  # first: the device may have room for one network alone
            del loading
            loading = asyncio.create_task(self._run(None, self._build, model.settings, model.classes))
            self._networks[name] = loading
        self._requested_s[name] = now_s
        return await asyncio.shield(loading)

    def _add(self, network: Network, request: RowsRequest, keys: list[RowKey], rows_n: list[int]) -> _Block:
        """Begin to compute some rows of a request."""
        block = _Block(keys, asyncio.get_running_loop().create_future())
        self._rows |= {key: (block, row) for row, key in enumerate(keys)}
        task = asyncio.create_task(self._compute(network, request, block, rows_n))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return block

    async def _compute(self, network: Network, request: RowsRequest, block: _Block, rows_n: list[int]) -> None:
        """Fetch a block's images and queue it; compute what waits there, unless enough others do."""
        try:
            images_BHWC = await request.images_BHWC
        except Exception as error:
            self._fail(block, TeacherServiceLostError(f"its images are lost: {type(error).__name__}"))
            return
        images_nHWC = images_BHWC if len(rows_n) == len(images_BHWC) else images_BHWC[rows_n]
        self._queue.append(_Task(network, request.epoch, images_nHWC, block))
        if self._num_computing < _CONCURRENT:
            self._num_computing += 1
            while self._queue:
                await self._compute_next()
            self._num_computing -= 1

    async def _compute_next(self) -> None:
        """Compute the oldest block, and with it those behind it of its network and epoch that fit.

        A network that raises fails the requests that wait for it; repeated, they are tried again.
        """
        tasks = [first := self._queue.popleft()]
        while self._queue and self._queue[0][:2] == first[:2]:
            if sum(len(task.images_nHWC) for task in (*tasks, self._queue[0])) > self._max_rows:
                break
            tasks.append(self._queue.popleft())
        samples, sizes = [key[2] for task in tasks for key in task.block.keys], [len(task.images_nHWC) for task in tasks]
        images = [task.images_nHWC for task in tasks]
        try:
            wait = await self._run(self._launcher, first.network.launch, images, np.array(samples), first.epoch)
            rows_n = await self._run(None, wait)
        except Exception as error:
            for task in tasks:
                self._fail(task.block, error)
            return
        self._max_rows = max(self._max_rows, *sizes)
        self._num_computed += len(samples)
        for task, part_n in zip(tasks, np.split(rows_n, np.cumsum(sizes)[:-1]), strict=True):
            task.block.rows_n.set_result(part_n.copy())  # to be freed without the others
            self._computed.append(task.block)
            self._num_bytes += task.block.num_bytes
        while self._num_bytes > self._memory_bytes and len(self._computed) > 1:
            oldest = self._computed.popleft()
            self._num_bytes -= oldest.num_bytes
            self._forget(oldest)

    def _fail(self, block: _Block, error: Exception) -> None:
        self._forget(block)
        block.rows_n.set_exception(error)

    def _forget(self, block: _Block) -> None:
        for key in block.keys:
            del self._rows[key]

    async def _run(self, pool: Executor | None, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns in a thread. Where the GPU has failed, the process exits, and Ray starts another."""
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
        except RuntimeError as error:
            if kind_of(error) == "device":
                os._exit(1)
            raise

    def _load(self, settings: dict[str, Any], classes: Sequence[str]) -> Network:
        fetch_inputs(settings)
        return ServedNetwork(TrainConfig.model_validate(settings), classes, self._device)
