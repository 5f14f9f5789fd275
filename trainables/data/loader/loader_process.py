"""A worker's loader process, whose threads read the batches of all the worker's loaders into shared memory.

The training thread then does not share its GIL with loader threads. The process runs `loader_server`.
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
from trainables.data.loader.batch_memory import BatchMemory
from trainables.data.loader.batch_reader import Request
from trainables.data.loader.malloc import REUSE_FREED_MEMORY
from trainables.data.loader.sample_reader import ReadResult, ThreadTimes
from trainables.errors import DataError, LoaderDiedError

log = logging.getLogger("raydistill")

_SERVER = "from trainables.data.loader.loader_server import main; main()"
_SHUTDOWN_TIMEOUT_S = 5.0


def loader_process(data: DataConfig, *, world_size: int, device: torch.device) -> "LoaderProcess | None":
    """Return the process that `data.loader` asks for, started on first use; None to use threads of the training process.

    `auto` is a process if training on a GPU, since the GIL would delay kernel launches, unless the GPU also decodes, since the
    encoded images would be copied between processes. On a CPU it is threads: cores are the limit, and a process costs memory.
    """
    chosen = data.loader
    if chosen == "auto":
        chosen = "process" if device.type == "cuda" and not data.decodes_on_device else "threads"
    if chosen == "threads" or not data.loader_workers:
        return None
    if sys.platform != "linux":
        raise DataError("data.loader: process needs Linux; write data.loader=threads")
    return LoaderProcess(-(-data.global_batch_size // world_size), data.image_size, pinned=device.type == "cuda")


class LoaderProcess:
    """A process that the first `open` starts; it ends when the last reader is closed, or when this process ends in any way.

    Its batches have up to `rows` images, page-locked in this process if `pinned`. Only the thread that iterates over the loaders
    may call its methods and those of its readers.
    """

    def __init__(self, rows: int, image_size: int, *, pinned: bool) -> None:
        self._rows, self._image_size, self._pinned = rows, image_size, pinned
        self._num_opened, self._open = 0, set[int]()
        self._pending = deque[ProcessReads]()  # responses arrive in the order of the requests

    def open(self, source: Source, data: DataConfig, **options: Any) -> "ProcessReader":
        """Open a BatchReader in the process. Errors from reopening the source there are raised with the first batch."""
        pickled = pickle.dumps((source, data, options))
        if not self._open:
            self._start()
        self._num_opened += 1
        self._open.add(self._num_opened)
        self.send(self._num_opened, "open", pickled)
        return ProcessReader(self, self._num_opened)

    def send(self, reader: int, method: str, *arguments: Any) -> None:
        """Call a method of a reader. If the process has died, waiting for a batch raises that."""
        if reader in self._open:
            with contextlib.suppress(ConnectionError):
                self._connection.send_bytes(pickle.dumps((reader, method, arguments)))

    def begin(self, reader: int, request: Request, block: int) -> "ProcessReads":
        """See `BatchReader.begin`."""
        reads = ProcessReads(self)
        if reader in self._open:
            self._pending.append(reads)
            self.send(reader, "begin", tuple(request), block)
        else:
            reads.response = CancelledError()
        return reads

    def receive(self, reads: "ProcessReads", *, wait: bool) -> bool:
        """Receive responses up to the one for `reads`; without `wait`, only those available. Raises LoaderDiedError."""
        while reads.response is None:
            try:
                if not wait and not self._readable.poll(0):
                    return False
                message = self._connection.recv()
            except (EOFError, ConnectionError):
                raise _exit_error(self._process.wait()) from None
            if isinstance(message, logging.LogRecord):
                log.handle(message)
            elif isinstance(message, Exception):
                self._pending.popleft().response = message
            else:  # plain types: unpickling a class by name would take as long as everything else
                bad, encoded_rows, times = message
                self._pending.popleft().response = ReadResult(bad, encoded_rows, ThreadTimes(*times))
        return True

    def close(self, reader: int) -> None:
        """Close a reader; end the process with the last one."""
        if reader not in self._open:
            return
        self.send(reader, "close", False)
        self._open.discard(reader)
        if self._open:
            return
        self._connection.close()  # the process ends
        try:
            self._process.wait(_SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while self._pending:
            self._pending.popleft().response = CancelledError()
        self.memory.close()

    def _start(self) -> None:
        self.memory = BatchMemory(self._rows, self._image_size, os.memfd_create("loader batches"), pinned=self._pinned)
        ours, theirs = socket.socketpair()
        handles = theirs.fileno(), self.memory.handle
        arguments = map(str, (os.getpid(), *handles, self._rows, self._image_size))
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _SERVER, *arguments],
                    pass_fds=handles,
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C and a group's SIGTERM should reach only this process, which then ends that one
                    env={**REUSE_FREED_MEMORY, **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                )
            except OSError as error:
                self.memory.close()
                raise DataError(
                    f"data.loader: the loader process cannot be started: {error.strerror}; write data.loader=threads"
                ) from error
        self._connection = Connection(ours.detach())
        self._readable = select.poll()  # the connection's own `poll` would take as long as all other work per batch here
        self._readable.register(self._connection.fileno(), select.POLLIN)


class ProcessReads:
    """A batch that a loader process is reading; see `Reads`."""

    def __init__(self, process: LoaderProcess) -> None:
        self._process = process
        self.response: ReadResult | Exception | None = None

    def done(self) -> bool:
        return self._process.receive(self, wait=False)

    def result(self) -> ReadResult:
        self._process.receive(self, wait=True)
        if isinstance(self.response, Exception):
            raise self.response
        assert self.response is not None
        return self.response

    def settle(self) -> None:
        with contextlib.suppress(LoaderDiedError):  # a dead process writes nothing
            self._process.receive(self, wait=True)


class ProcessReader:
    """A proxy for a `BatchReader` in a loader process."""

    def __init__(self, process: LoaderProcess, number: int) -> None:
        self._process, self._number, self.memory = process, number, process.memory

    def begin(self, request: Request, block: int) -> ProcessReads:
        return self._process.begin(self._number, request, block)

    def stop(self, iteration: int) -> None:
        self._process.send(self._number, "stop", iteration)

    def close(self) -> None:
        self._process.close(self._number)


def _exit_error(code: int) -> LoaderDiedError:
    if code >= 0:
        where = "this worker's log, worker-*.err in the logs of Ray's session"
        return LoaderDiedError(f"the loader process exited with code {code}; its error is in {where}")
    name = signal.Signals(-code).name
    memory = "; if the node ran out of memory, lower data.loader_workers or data.prefetch_batches" * (name == "SIGKILL")
    return LoaderDiedError(f"the loader process was killed by {name}{memory}")
