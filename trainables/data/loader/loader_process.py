"""A worker's loader process: its threads read the batches of all the worker's loaders into memory that both processes map.

The training thread shares its GIL with no loader thread then, and handles a batch at a time. The other side is `loader_server`.
"""

import contextlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from concurrent.futures import CancelledError
from multiprocessing.connection import Connection
from typing import Any

import torch

from trainables.config import DataConfig
from trainables.data.interface import Source
from trainables.data.loader.batch_layout import BatchLayout
from trainables.data.loader.batch_memory import Block, SharedBatchMemory
from trainables.data.loader.batch_reader import Reads, Request
from trainables.data.loader.loader_messages import FailedReads, LogLine, Response
from trainables.data.loader.malloc import REUSE_FREED_MEMORY
from trainables.data.loader.sample_reader import ReadResult, ThreadTimes
from trainables.errors import DataError, LoaderDiedError

log = logging.getLogger("raydistill")

_SERVER = "from trainables.data.loader.loader_server import main; main()"
_END_S = 5.0


def loader_process(data: DataConfig, *, world_size: int, device: torch.device) -> "LoaderProcess | None":
    """The process that `data.loader` asks for; None: the threads live in the training process. It starts on first use.

    `auto`: a process where a GPU trains, whose launches the GIL would delay, unless the GPU decodes, too: encoded images would be
    copied between the processes. On a CPU, threads: there the cores are the limit, and a process costs memory.
    """
    chosen = data.loader
    if chosen == "auto":
        chosen = "process" if device.type == "cuda" and not data.decodes_on_device else "threads"
    if chosen == "threads" or not data.loader_workers:
        return None
    if sys.platform != "linux":
        raise DataError("data.loader: process needs Linux; write data.loader=threads")
    layout = BatchLayout(-(-data.global_batch_size // world_size), data.image_size)
    return LoaderProcess(layout, pinned=device.type == "cuda")


class LoaderProcess:
    """Started by the first `open`; ends with the last reader that is closed, and with this process, however that ends.

    All methods, and those of its readers, are for the thread that iterates over the loaders.
    """

    def __init__(self, layout: BatchLayout, *, pinned: bool) -> None:
        self._layout, self._pinned = layout, pinned
        self._process: subprocess.Popen[bytes] | None = None
        self._num_opened, self._open = 0, set[int]()
        self._pending = deque[_ProcessReads]()

    def open(self, source: Source, data: DataConfig, **options: Any) -> "ProcessReader":
        """A reader there, see `BatchReader`. What fails as it opens the source again is raised where the first batch is taken."""
        pickled = pickle.dumps((source, data, options))
        if self._process is None:
            self._start()
        self._num_opened += 1
        self._open.add(self._num_opened)
        self.send(self._num_opened, "open", pickled)
        return ProcessReader(self, self._num_opened)

    def send(self, reader: int, method: str, *arguments: Any) -> None:
        """Call a method of a reader, or of none where the process has died: whoever waits for its response raises that."""
        if self._open:
            try:
                self._connection.send_bytes(pickle.dumps((reader, method, arguments)))
            except ConnectionError:
                return

    def begin(self, reader: int, request: Request, block: Block) -> Reads:
        """See `BatchReader.begin`."""
        reads = _ProcessReads(self)
        if self._open:
            self._pending.append(reads)
            self.send(reader, "begin", tuple(request), block.number)
        else:
            reads.response = FailedReads(CancelledError())
        return reads

    def receive(self, *, wait: bool) -> bool:
        """Take the next response, for the batch that has waited longest. False: there is none yet. Raises LoaderDiedError."""
        try:
            if not wait and not self._readable.poll(0):
                return False
            message = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._death() from None
        if isinstance(message, LogLine):
            log.log(message.level, "%s", message.message)
        else:
            self._pending.popleft().response = message
        return True

    def close(self, reader: int) -> None:
        """Close a reader, and with the last one the process."""
        self.send(reader, "close")
        self._open.discard(reader)
        if self._open or self._process is None:
            return
        process, self._process = self._process, None
        self._connection.close()  # the process ends
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        while self._pending:
            self._pending.popleft().response = FailedReads(CancelledError())
        self.memory.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self.memory = SharedBatchMemory(self._layout, pinned=self._pinned)
        handles = theirs.fileno(), self.memory.handle
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _SERVER, str(os.getpid()), *map(str, handles)],
                    pass_fds=handles,
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C and a SIGTERM to the group are for this process, which ends it
                    env={**REUSE_FREED_MEMORY, **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                )
            except OSError as error:
                self.memory.close()
                raise DataError(
                    f"data.loader: the loader process cannot be started: {error.strerror}; write data.loader=threads"
                ) from error
        self._connection = Connection(ours.detach())
        self._readable = select.poll()  # the connection's own `poll` takes as long as all else that a batch takes here
        self._readable.register(self._connection.fileno(), select.POLLIN)
        self._connection.send((self.memory.layout, self.memory.block_bytes))

    def _death(self) -> LoaderDiedError:
        assert self._process is not None
        code = self._process.wait()
        if code >= 0:
            where = "this worker's log, worker-*.err in the logs of Ray's session"
            return LoaderDiedError(f"the loader process ended with exit code {code}; its error is in {where}")
        name = signal.Signals(-code).name
        memory = "; if the node's memory ran out: fewer data.loader_workers or data.prefetch_batches" * (name == "SIGKILL")
        return LoaderDiedError(f"the loader process was ended by {name}{memory}")


class ProcessReader:
    """A `BatchReader` in a loader process."""

    def __init__(self, process: LoaderProcess, number: int) -> None:
        self._process, self._number = process, number

    def begin(self, request: Request, block: Block) -> Reads:
        return self._process.begin(self._number, request, block)

    def stop(self, iteration: int) -> None:
        self._process.send(self._number, "stop", iteration)

    def resize(self, threads: int) -> None:
        self._process.send(self._number, "resize", threads)

    def close(self) -> None:
        self._process.close(self._number)


class _ProcessReads:
    """A batch that a loader process reads; see `Reads`."""

    def __init__(self, process: LoaderProcess) -> None:
        self._process = process
        self.response: Response | FailedReads | None = None

    def done(self) -> bool:
        while self.response is None and self._process.receive(wait=False):
            pass
        return self.response is not None

    def results(self) -> list[ReadResult]:
        while self.response is None:
            self._process.receive(wait=True)
        if isinstance(self.response, FailedReads):
            raise self.response.error from self.response.cause
        bad, encoded_rows, times = self.response
        return [ReadResult(bad, encoded_rows, ThreadTimes(*times))]

    def end(self) -> None:
        with contextlib.suppress(LoaderDiedError):  # then nothing is written any more
            while self.response is None:
                self._process.receive(wait=True)
