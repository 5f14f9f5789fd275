"""The actor of a teacher service: a batcher in front of the networks, and a memory of the logits that they computed.

Logits are a function of key, epoch and sample, whoever requests them, however often and in whatever order. So a client that lost
a response repeats the request, and clients that request the same image at once wait for the same computation.

Shapes: B samples of a request, R of them sent with their images, n images of one block, H=W pixels, C=3 channels, K classes.
"""

import asyncio
import contextlib
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
from trainables.failures import kind_of
from trainables.object_store.stage_copy import fetch_inputs
from trainables.process_exit import skip_exit_handlers
from trainables.teachers.service.protocol import LogitsRequest, LogitsResponse
from trainables.teachers.service.served_network import ServedNetwork

MEMORY_BYTES = 1 << 30
"""Logits in memory: 3 million images of 10 classes, 250,000 of 1000; students side by side need those of a few steps."""
_ROW_BYTES = 300
"""A row's entry in the memory takes about so much besides its logits."""
UPLOAD_TIMEOUT_S = 2.0
"""So long other clients wait for the images that one client was asked to send; then one of them is asked."""
IDLE_TIMEOUT_S = 300.0
"""A network without a request for so long is dropped when another one is loaded, as trials with other seeds have their own."""
_CONCURRENT = 2
"""Batches under way: while a GPU computes one, the next is queued behind it."""

T = TypeVar("T")
RowKey = tuple[str, int, int]
"""Key, epoch, sample."""


class Network(Protocol):
    """A teacher as the actor runs it."""

    def launch(self, images: Sequence[NDArray[np.uint8]], samples_n: NDArray[np.int64], epoch: int) -> Callable[[], NDArray[Any]]:
        """Begin a forward pass over images in several arrays (·, H, W, C), n in all; the result waits for the logits (n, K)."""


Build = Callable[[dict[str, Any], Sequence[str]], Network]
"""Makes a network from a worker's settings and the classes."""


@dataclass(eq=False)
class _Block:
    """The logits of images that one client sent at once."""

    keys: list[RowKey]
    logits_nK: asyncio.Future[NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        return self.logits_nK.result().nbytes + _ROW_BYTES * len(self.keys)


class _Task(NamedTuple):
    """A block that waits for its network."""

    network: Network
    epoch: int
    images_nHWC: NDArray[np.uint8]
    block: _Block


class TeacherActor:
    """Serves the logits of several students, and computes each row once as long as its memory has it.

    All state belongs to the event loop; threads only build and run networks.
    """

    def __init__(
        self,
        device: str,
        threads: int,
        *,
        build: Build | None = None,
        memory_bytes: int = MEMORY_BYTES,
        upload_timeout_s: float = UPLOAD_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """`threads`: compute threads on a CPU. `build`: other networks than the experiment's."""
        self._device = torch.device(device)
        self._build = build or self._load
        self._memory_bytes, self._upload_timeout_s, self._idle_timeout_s = memory_bytes, upload_timeout_s, idle_timeout_s
        self._networks: dict[str, asyncio.Task[Network]] = {}
        self._requested_s: dict[str, float] = {}
        """When each network was last requested, on the monotonic clock."""
        self._rows: dict[RowKey, tuple[_Block, int]] = {}
        """The memory: where the logits of a row are, or will be."""
        self._computed, self._num_bytes = deque[_Block](), 0
        self._upload_deadlines: dict[RowKey, float] = {}
        """Rows whose images a client was asked to send, and until when the others wait for them."""
        self._arrival = asyncio.Event()
        self._queue: list[_Task] = []
        self._tasks = set[asyncio.Task[None]]()
        self._max_rows = 1
        """Images that are computed together at most: the largest block that one client sent and that fitted into memory."""
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="teacher")
        self._num_computed, self._num_returned = 0, 0
        skip_exit_handlers()
        torch.set_num_threads(threads)
        set_matmul_precision()

    async def logits(self, request: LogitsRequest) -> LogitsResponse:
        """See `LogitsResponse`. Raises DistillError: the teacher cannot be loaded."""
        network = await self._network(request)
        keys = [(request.key, request.epoch, sample) for sample in request.indices_B.tolist()]
        num_computed = self._add_images(network, request, keys)
        while absent := [row for row, key in enumerate(keys) if key not in self._rows]:
            now_s = time.monotonic()
            unrequested = [row for row in absent if self._upload_deadlines.get(keys[row], 0.0) <= now_s]
            if unrequested:
                self._upload_deadlines |= dict.fromkeys((keys[row] for row in unrequested), now_s + self._upload_timeout_s)
                return LogitsResponse(missing=np.array(unrequested), num_computed=num_computed)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), min(self._upload_deadlines[keys[row]] for row in absent) - now_s)
        found = [self._rows[key] for key in keys]
        await asyncio.wait({block.logits_nK for block, _ in found})
        logits_BK = np.stack([block.logits_nK.result()[row] for block, row in found])
        self._num_returned += len(keys)
        return LogitsResponse(logits_BK, num_computed=num_computed)

    async def counts(self) -> dict[str, int]:
        """Images since the actor began: `computed` by the networks, and `returned` to clients."""
        return {"computed": self._num_computed, "returned": self._num_returned}

    async def _network(self, request: LogitsRequest) -> Network:
        """The network of a request, loaded where it is not there; after a failure the next request tries again."""
        name, now_s = request.key.partition("-")[0], time.monotonic()
        loading = self._networks.get(name)
        if loading is None or (loading.done() and loading.exception() is not None):
            for idle in [each for each in self._networks if self._requested_s[each] < now_s - self._idle_timeout_s]:
                del self._networks[idle]  # first: the device may have room for one network alone
            del loading
            loading = asyncio.create_task(self._run(None, self._build, request.settings, request.classes))
            self._networks[name] = loading
        self._requested_s[name] = now_s
        return await asyncio.shield(loading)

    def _add_images(self, network: Network, request: LogitsRequest, keys: list[RowKey]) -> int:
        """Queue the sent images whose logits are neither there nor under way; returns how many they are."""
        if request.images_RHWC is None:
            return 0
        new = {keys[row]: sent for sent, row in enumerate(request.rows_R.tolist()) if keys[row] not in self._rows}
        if not new:
            return 0
        images_nHWC = request.images_RHWC if len(new) == len(request.rows_R) else request.images_RHWC[list(new.values())]
        block = _Block(list(new), asyncio.get_running_loop().create_future())
        for row, key in enumerate(new):
            self._rows[key] = block, row
            self._upload_deadlines.pop(key, None)
        self._queue.append(_Task(network, request.epoch, images_nHWC, block))
        if len(self._tasks) < _CONCURRENT:
            task = asyncio.create_task(self._compute())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._arrival.set()
        self._arrival = asyncio.Event()
        return len(new)

    async def _compute(self) -> None:
        """Compute what waits. A network that raises fails the requests that wait for it; repeated, they are tried again."""
        while tasks := self._take():
            blocks = [task.block for task in tasks]
            samples, sizes = [key[2] for block in blocks for key in block.keys], [len(block.keys) for block in blocks]
            images, launch, epoch = [task.images_nHWC for task in tasks], tasks[0].network.launch, tasks[0].epoch
            try:
                wait = await self._run(self._launcher, launch, images, np.array(samples), epoch)
                logits_nK = await self._run(None, wait)
            except Exception as error:
                for block in blocks:
                    self._forget(block)
                    block.logits_nK.set_exception(error)
                continue
            self._max_rows = max(self._max_rows, *sizes)
            self._num_computed += len(samples)
            for block, block_logits_nK in zip(blocks, np.split(logits_nK, np.cumsum(sizes)[:-1]), strict=True):
                block.logits_nK.set_result(block_logits_nK.copy())  # the whole is in pinned memory
                self._computed.append(block)
                self._num_bytes += block.num_bytes
            while self._num_bytes > self._memory_bytes and len(self._computed) > 1:
                oldest = self._computed.popleft()
                self._num_bytes -= oldest.num_bytes
                self._forget(oldest)

    def _take(self) -> list[_Task]:
        """The oldest task, and others of its network and epoch with it; empty where none waits."""
        taken, num_rows = self._queue[:1], sum(len(task.images_nHWC) for task in self._queue[:1])
        for task in self._queue[1:]:
            matches = task.network is taken[0].network and task.epoch == taken[0].epoch
            if matches and num_rows + len(task.images_nHWC) <= self._max_rows:
                taken.append(task)
                num_rows += len(task.images_nHWC)
        self._queue = [task for task in self._queue if not any(task is each for each in taken)]
        return taken

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
