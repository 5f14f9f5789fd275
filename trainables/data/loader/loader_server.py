"""The main program of a loader process, which reads batches for the loader that started it, and ends with its worker.

Its arguments are the worker's process id, a socket and the batch memory. It must not import torch, see `batch_reader`.
"""

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from trainables.data.loader.batch_memory import BatchMemory
from trainables.data.loader.batch_reader import BatchReader, ReadResult, Reads, Request
from trainables.stacks import write_stacks_on_signal

_POLL_INTERVAL_S = 1.0


def main() -> None:
    """Serve until the worker closes the connection or is gone."""
    worker, socket, *memory = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_stacks_on_signal()  # for hang reports
    try:
        handle, rows, image_size = memory
        _serve(Connection(socket), worker, BatchMemory(rows, image_size, handle))
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without joining threads, which may be stuck on a disk


class _WorkerHandler(logging.Handler):
    """Sends messages from any thread to the worker, including log records, which the worker logs."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection, self._sending = connection, threading.Lock()

    def send(self, message: tuple[Any, ...] | Exception | logging.LogRecord) -> None:
        with self._sending, contextlib.suppress(ConnectionError):  # the worker is gone, and this process will end soon
            self._connection.send(message)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()  # the arguments may not be picklable
        self.send(logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, message, None, None))


def _serve(connection: Connection, worker: int, memory: BatchMemory) -> None:
    to_worker = _WorkerHandler(connection)
    log = logging.getLogger("raydistill")
    log.addHandler(to_worker)
    log.propagate = False
    begun = SimpleQueue[Reads]()
    threading.Thread(target=_respond, args=(begun, to_worker), name="responses", daemon=True).start()
    opened, reader = b"", None

    def begin(request: tuple[int, ...], block: int) -> Reads:
        nonlocal reader
        try:
            if reader is None:
                source, data, options = pickle.loads(opened)
                reader = BatchReader(memory, source, data, **options)
            return reader.begin(Request(*request), block)
        except Exception as error:
            failed: Future[ReadResult] = Future()
            failed.set_exception(error)
            return Reads([failed])

    for method, arguments in _messages(connection, worker):
        if method == "open":
            (opened,) = arguments
        elif method == "begin":
            begun.put(begin(*arguments))
        elif reader is not None:
            reader.stop(*arguments)


def _messages(connection: Connection, worker: int) -> Iterator[Any]:
    while os.getppid() == worker:  # a fork of the worker may keep the connection open
        try:
            if connection.poll(_POLL_INTERVAL_S):
                yield connection.recv()
        except (EOFError, OSError):  # the connection was closed, perhaps within a message
            return


def _respond(begun: SimpleQueue[Reads], to_worker: _WorkerHandler) -> None:
    try:
        while True:
            to_worker.send(_response(begun.get()))
    except BaseException:  # without this thread the worker would wait forever; it does report a dead process
        traceback.print_exc()
        os._exit(1)


def _response(reads: Reads) -> tuple[Any, ...] | Exception:
    """Return what the threads have read for a batch, or the error for the worker to raise."""
    try:
        bad, regions, times = reads.result()
        return bad, [region._replace(data=bytes(region.data)) for region in regions], tuple(times)
    except Exception as error:
        reads.settle()  # the worker will reuse the memory
        try:
            copied: Exception = pickle.loads(pickle.dumps(error))
        except Exception:  # not picklable
            return RuntimeError(f"{type(error).__name__}: {error}")
        return copied
