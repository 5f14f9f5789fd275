"""A loader's process, whose threads read the batches into memory that it shares with the training process.

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
from trainables.data.loader.batch_reader import ReadResult, Request
from trainables.data.loader.costs import ThreadTimes
from trainables.data.loader.malloc import REUSE_FREED_MEMORY
from trainables.errors import DataError, LoaderDiedError

log = logging.getLogger("raydistill")

_SERVER = "from trainables.data.loader.loader_server import main; main()"
_SHUTDOWN_TIMEOUT_S = 5.0


def uses_process(data: DataConfig, device: torch.device) -> bool:
    """Whether `data.loader` asks for a process rather than threads of the training process. Raises DataError without Linux.

    `auto` is a process if training on a GPU, since the GIL would delay kernel launches, unless the GPU also decodes, since the
    encoded images would be copied between processes. On a CPU it is threads: cores are the limit, and a process costs memory.
    """
    chosen = data.loader
    if chosen == "auto":
        chosen = "process" if device.type == "cuda" and not data.decodes_on_device else "threads"
    if chosen == "process" and sys.platform != "linux":
        raise DataError("data.loader: process needs Linux; write data.loader=threads")
    return chosen == "process"


class ProcessReader:
    """A `BatchReader` in a process of its own, which ends with `close`, or when this process ends in any way.

    Only the thread that iterates over the loader may call its methods.
    """

    def __init__(self, rows: int, source: Source, data: DataConfig, *, pinned: bool, **options: Any) -> None:
        """Batches have up to `rows` images, page-locked in this process if `pinned`; `options` are those of BatchReader.

        Errors from reopening the source in the process are raised with the first batch.
        """
        opened = pickle.dumps((source, data, options))  # on its own, so that the process can report what cannot be opened
        self.memory = BatchMemory(rows, data.image_size, os.memfd_create("loader batches"), pinned=pinned)
        self._pending = deque[ProcessReads]()  # responses arrive in the order of the requests
        ours, theirs = socket.socketpair()
        handles = theirs.fileno(), self.memory.handle
        arguments = map(str, (os.getpid(), *handles, rows, data.image_size))
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
        self._send("open", opened)

    def begin(self, request: Request, block: int) -> "ProcessReads":
        """See `BatchReader.begin`."""
        reads = ProcessReads(self)
        if self._connection.closed:
            reads.response = CancelledError()
        else:
            self._pending.append(reads)
            self._send("begin", tuple(request), block)
        return reads

    def stop(self, iteration: int) -> None:
        """See `BatchReader.stop`."""
        if not self._connection.closed:
            self._send("stop", iteration)

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

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        try:
            self._process.wait(_SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while self._pending:
            self._pending.popleft().response = CancelledError()
        self.memory.close()

    def _send(self, method: str, *arguments: Any) -> None:
        with contextlib.suppress(ConnectionError):  # if the process has died, waiting for a batch raises that
            self._connection.send_bytes(pickle.dumps((method, arguments)))


class ProcessReads:
    """A batch that a loader process is reading; see `Reads`."""

    def __init__(self, reader: ProcessReader) -> None:
        self._reader = reader
        self.response: ReadResult | Exception | None = None

    def done(self) -> bool:
        return self._reader.receive(self, wait=False)

    def result(self) -> ReadResult:
        self._reader.receive(self, wait=True)
        if isinstance(self.response, Exception):
            raise self.response
        assert self.response is not None
        return self.response

    def settle(self) -> None:
        with contextlib.suppress(LoaderDiedError):  # a dead process writes nothing
            self._reader.receive(self, wait=True)


def _exit_error(code: int) -> LoaderDiedError:
    if code >= 0:
        where = "this worker's log, worker-*.err in the logs of Ray's session"
        return LoaderDiedError(f"the loader process exited with code {code}; its error is in {where}")
    name = signal.Signals(-code).name
    memory = "; if the node ran out of memory, lower data.loader_workers or data.prefetch_batches" * (name == "SIGKILL")
    return LoaderDiedError(f"the loader process was killed by {name}{memory}")
