"""The actor of a teacher service: the networks, and a memory of the rows that they computed.

Rows are a function of key, epoch and sample, whoever requests them, however often and in whatever order. So a client that lost
a response repeats the request, and clients that request the same image at once wait for the same computation.

Shapes: B samples of a request, n of them that are computed for it, H=W=data.image_size pixels, C=3 channels.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.config import TrainConfig
from trainables.device.augment import build_train_inputs
from trainables.device.device_batches import DeviceBatch
from trainables.device.precision import set_matmul_precision, with_precision
from trainables.device.tensor_format import autocast, pixels_of
from trainables.distributed.group import Group
from trainables.errors import TeacherServiceLostError
from trainables.failures import kind_of
from trainables.object_store.checkpoints import fetch_inputs
from trainables.process_exit import skip_exit_handlers
from trainables.teachers.network import ROWS, row_network
from trainables.teachers.rows import RowFormat, Rows
from trainables.teachers.service.protocol import RowsRequest, RowsResponse, ServedModel

MEMORY_BYTES = 1 << 30
"""Rows in memory: 3 million images of 10 classes, 250,000 of 1000; students side by side need those of a few steps."""
_ROW_BYTES = 350
"""A row's entry in the memory takes about so much besides its numbers."""
IDLE_TIMEOUT_S = 300.0
"""A network without a request for so long is dropped when another one is loaded, as trials with other seeds have their own."""
_CONCURRENT = 2
"""Batches under way: while a GPU computes one, the next is queued behind it."""

T = TypeVar("T")
RowKey = tuple[str, int | None, int]
"""Key, epoch, sample."""
Launch = Callable[[NDArray[np.uint8], NDArray[np.int64], int | None], Callable[[], Rows]]
"""Begins a forward pass over images (n, H, W, C) of the samples (n,) in the augmentation of an epoch; None: as they are. The
result waits for their rows (n,)."""


class TeacherActor:
    """Serves the rows of several students, and computes each row once as long as its memory has it.

    All state belongs to the event loop; threads only build and run networks.
    """

    def __init__(
        self,
        device: str,
        threads: int,
        *,
        build: Callable[[ServedModel], Launch] | None = None,
        memory_bytes: int = MEMORY_BYTES,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """`threads`: compute threads on a CPU. `build`: other networks than the experiment's."""
        self._device = torch.device(device)
        self._build, self._memory_bytes, self._idle_timeout_s = build or self._load, memory_bytes, idle_timeout_s
        self._networks: dict[str, asyncio.Task[Launch]] = {}
        self._requested_s: dict[str, float] = {}
        """When each network was last requested, on the monotonic clock."""
        self._rows: dict[RowKey, asyncio.Future[Any]] = {}
        """The memory, the oldest first: rows that are there, or will be."""
        self._tasks = set[asyncio.Task[None]]()
        self._turns = asyncio.Semaphore(_CONCURRENT)
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="teacher")
        self._num_computed, self._num_returned = 0, 0
        skip_exit_handlers()
        torch.set_num_threads(threads)
        set_matmul_precision()

    async def rows(self, request: RowsRequest) -> RowsResponse:
        """See `RowsResponse`. Raises DistillError: the teacher cannot be loaded; TeacherServiceLostError: the images are lost."""
        launch, num_computed = await self._network(request.model), 0
        keys = [(request.model.key, request.epoch, sample) for sample in request.indices_B.tolist()]
        while True:
            new = [number for number, key in enumerate(keys) if key not in self._rows]
            self._rows |= {keys[number]: asyncio.get_running_loop().create_future() for number in new}
            rows_B = [self._rows[key] for key in keys]
            if new:
                task = asyncio.create_task(self._compute(launch, request, new, [rows_B[number] for number in new]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            num_computed += len(new)
            await asyncio.wait(rows_B)
            try:
                response = RowsResponse(np.stack([row.result() for row in rows_B]), num_computed)
            except TeacherServiceLostError:
                if new and rows_B[new[0]].exception():
                    raise
                continue  # another client, which has gone with its images: compute those of this one
            self._num_returned += len(keys)
            return response

    async def counts(self) -> dict[str, int]:
        """Images since the actor began: `computed` by the networks, and `returned` to clients."""
        return {"computed": self._num_computed, "returned": self._num_returned}

    async def _network(self, model: ServedModel) -> Launch:
        """The network of a job, loaded where it is not there; after a failure the next request tries again."""
        name, now_s = model.key.partition("-")[0], time.monotonic()
        loading = self._networks.get(name)
        if loading is None or (loading.done() and loading.exception() is not None):
            for idle in [each for each in self._networks if self._requested_s[each] < now_s - self._idle_timeout_s]:
                del self._networks[idle]  # first: the device may have room for one network alone
            del loading
            loading = asyncio.create_task(self._run(None, self._build, model))
            self._networks[name] = loading
        self._requested_s[name] = now_s
        return await asyncio.shield(loading)

    async def _compute(self, launch: Launch, request: RowsRequest, new: list[int], rows: list[asyncio.Future[Any]]) -> None:
        """Fetch the images of a request whose rows are `new`, and compute these when it is their turn.

        A network that raises fails the requests that wait for it; repeated, they are tried again.
        """
        samples_n = request.indices_B[new]
        keys = [(request.model.key, request.epoch, sample) for sample in samples_n.tolist()]
        try:
            images_BHWC = await request.images_BHWC
        except Exception as error:
            self._fail(keys, rows, TeacherServiceLostError(f"its images are lost: {type(error).__name__}"))
            return
        images_nHWC = images_BHWC if len(new) == len(images_BHWC) else images_BHWC[new]
        try:
            async with self._turns:
                wait = await self._run(self._launcher, launch, images_nHWC, samples_n, request.epoch)
                rows_n = await self._run(None, wait)
        except Exception as error:
            self._fail(keys, rows, error)
            return
        self._num_computed += len(rows)
        for row, value in zip(rows, rows_n, strict=True):
            row.set_result(value)
        while len(self._rows) * (rows_n.itemsize + _ROW_BYTES) > self._memory_bytes:
            del self._rows[next(iter(self._rows))]  # those who wait for it have it

    def _fail(self, keys: list[RowKey], rows: list[asyncio.Future[Any]], error: Exception) -> None:
        for key, row in zip(keys, rows, strict=True):
            row.set_exception(error)
            row.exception()  # so that asyncio does not log each one that nobody awaits
            if self._rows.get(key) is row:
                del self._rows[key]

    async def _run(self, pool: Executor | None, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns in a thread. Where the GPU has failed, the process exits, and Ray starts another."""
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
        except RuntimeError as error:
            if kind_of(error) == "device":
                os._exit(1)
            raise

    def _load(self, model: ServedModel) -> Launch:
        fetch_inputs(model.settings)
        return served_network(TrainConfig.model_validate(model.settings), model.classes, model.row_format, self._device)


def served_network(config: TrainConfig, classes: Sequence[str], row_format: RowFormat, device: torch.device) -> Launch:
    """The teacher of a worker's `config`: augmentation, precision and model as in that worker.

    Raises CheckpointError, ModelError: the teacher cannot be loaded.
    """
    config = with_precision(config, Group(device=device))
    teacher, pixels = row_network(config, device, classes, row_format), pixels_of(config)
    prepare, precision, on_gpu = build_train_inputs(config, device), autocast(config.precision, device), device.type == "cuda"

    def launch(images_nHWC: NDArray[np.uint8], samples_n: NDArray[np.int64], epoch: int | None) -> Callable[[], Rows]:
        # Pinned: a copy from other memory would wait for all work that the GPU has queued.
        host_images_nHWC = torch.empty(images_nHWC.shape, dtype=torch.uint8, pin_memory=on_gpu)
        np.copyto(host_images_nHWC.numpy(), images_nHWC)
        host_indices_n = torch.from_numpy(samples_n).pin_memory() if on_gpu else torch.from_numpy(samples_n)
        images_nCHW = host_images_nHWC.to(device, non_blocking=True).permute(0, 3, 1, 2)
        indices_n = host_indices_n.to(device, non_blocking=True)
        with torch.no_grad():
            if epoch is None:
                prepared_nCHW = pixels(images_nCHW)
            else:
                batch = DeviceBatch(images_nCHW, torch.zeros_like(indices_n), indices_n, host_indices_n, epoch)
                prepared_nCHW = prepare(batch).images_BCHW
        with precision():
            outputs = teacher(prepared_nCHW, len(samples_n))[ROWS]
        return row_format.to_host(samples_n, row_format.encode(outputs))

    return launch
