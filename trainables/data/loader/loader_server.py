"""The main program of a loader process: it reads batches for the worker that has started it, and ends with that worker.

Its arguments are that worker's process id, a socket and the batches' memory. It imports no torch, see `batch_reader`.
"""

import contextlib
import logging
import mmap
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.data.loader.batch_layout import BatchLayout
from trainables.data.loader.batch_reader import BatchReader, Reads, Request
from trainables.data.loader.loader_messages import FailedReads, LogLine, Response
from trainables.stacks import write_stacks_on_signal

_LOOK_S = 1.0


class LoaderServer:
    """Calls the readers' methods as the worker sends them; responses for batches go back in the order of their requests."""

    def __init__(self, connection: Connection, memory: int, layout: BatchLayout, block_bytes: int) -> None:
        self._connection, self._memory, self._layout, self._block_bytes = connection, memory, layout, block_bytes
        self._blocks: dict[int, tuple[NDArray[Any], ...]] = {}
        self._readers: dict[int, BatchReader] = {}
        self._failures: dict[int, Exception] = {}  # of readers that could not be opened
        self._begun = SimpleQueue[Reads | Exception]()
        self._sending = threading.Lock()
        threading.Thread(target=self._send_responses, name="responses", daemon=True).start()

    def dispatch(self, reader: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Call a method of a reader; its errors are sent where the worker waits for a batch."""
        if method == "open":
            self._open(reader, *arguments)
        elif method == "begin":
            self._begun.put(self._begin(reader, *arguments))
        elif method == "close":
            if opened := self._readers.pop(reader, None):
                opened.close(wait=False)
        elif opened := self._readers.get(reader):
            getattr(opened, method)(*arguments)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close(wait=False)

    def send(self, message: Any) -> None:
        with self._sending, contextlib.suppress(ConnectionError):  # the worker is gone, and soon so is this process
            self._connection.send_bytes(pickle.dumps(message))

    def _open(self, reader: int, pickled: bytes) -> None:
        try:
            source, data, options = pickle.loads(pickled)
            self._readers[reader] = BatchReader(source, data, **options)
        except Exception as error:
            self._failures[reader] = error

    def _begin(self, reader: int, request: tuple[int, ...], block: int) -> Reads | Exception:
        try:
            if reader in self._failures:
                return self._failures[reader]
            return self._readers[reader].begin(Request(*request), self._block(block))
        except Exception as error:
            return error

    def _block(self, number: int) -> tuple[NDArray[Any], ...]:
        if number not in self._blocks:
            mapped = mmap.mmap(self._memory, self._block_bytes, offset=number * self._block_bytes)
            self._blocks[number] = self._layout.arrays(np.frombuffer(mapped, dtype=np.uint8))
        return self._blocks[number]

    def _send_responses(self) -> None:
        while True:
            self.send(_response(self._begun.get()))


class _SendToWorker(logging.Handler):
    """The worker logs what this process would log."""

    def __init__(self, server: LoaderServer) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        self._server.send(LogLine(record.levelno, record.getMessage()))


def main() -> None:
    """Serve until the worker closes the connection or is gone."""
    worker, handle, memory = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_stacks_on_signal()  # a hang is explained by what its threads do
    try:
        _serve(Connection(handle), worker, memory)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # threads may wait for a disk


def _serve(connection: Connection, worker: int, memory: int) -> None:
    messages = _messages(connection, worker)
    layout = next(messages, None)
    if layout is None:
        return
    server = LoaderServer(connection, memory, *layout)
    log = logging.getLogger("raydistill")
    log.addHandler(_SendToWorker(server))
    log.propagate = False
    for message in messages:
        server.dispatch(*message)
    server.close()


def _messages(connection: Connection, worker: int) -> Iterator[Any]:
    while os.getppid() == worker:  # a process that the worker has forked may keep the connection open
        try:
            if not connection.poll(_LOOK_S):
                continue
            message = connection.recv()
        except (EOFError, OSError):  # the end of the connection, perhaps in the middle of a message
            return
        yield message


def _response(reads: Reads | Exception) -> Response | FailedReads:
    """What the threads have read for a batch, as one part of it: what the worker does with it does not grow with the threads."""
    if isinstance(reads, Exception):
        return _failed(reads)
    try:
        parts = reads.results()
    except Exception as error:
        reads.end()  # the worker uses the memory again
        return _failed(error)
    bad = [entry for part in parts for entry in part.bad]
    regions = [region._replace(data=bytes(region.data)) for part in parts for region in part.encoded_rows]
    return bad, regions, tuple(map(sum, zip(*(part.times for part in parts), strict=True)))


def _failed(error: Exception) -> FailedReads:
    """The error as the worker is to raise it. One that cannot be sent becomes a RuntimeError with its text."""
    failed = FailedReads(error, error.__cause__)
    try:
        pickle.loads(pickle.dumps(failed))
    except Exception:
        return FailedReads(RuntimeError(f"{type(error).__name__}: {error}"))
    return failed
