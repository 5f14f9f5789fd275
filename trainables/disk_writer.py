"""Writes to disk in a thread of their own, so that no step waits for a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from trainables.rundir import append_lines


class _Lines(NamedTuple):
    """A write of lines that has not begun; further ones may join it."""

    path: Path
    records: list[dict[str, Any]]
    written: Future[None]


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "disk writer")


class DiskWriter:
    """Carries out one write after the other, in their order: what was put in later is on disk later.

    So a record that may only follow its checkpoint is put in behind it. After a failure nothing more is written, and every
    later call raises it. The thread starts with the first write. Leaving the context waits until all is written.
    """

    def __init__(self) -> None:
        self._pool = _thread()
        self._last: Future[None] | None = None
        self._lines: _Lines | None = None
        self._lines_lock = threading.Lock()
        self._failure: BaseException | None = None

    def __enter__(self) -> DiskWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None:
            self.check()

    def put(self, work: Callable[[], None]) -> Future[None]:
        """Have `work` carried out after all that was put in before. The future ends when it has, or raises why it has not.

        Raises Exception: why an earlier write has failed.
        """
        with self._lines_lock:
            self._lines = None  # a later line is on disk behind `work`
            return self._put(work)

    def put_line(self, path: Path, record: dict[str, Any]) -> Future[None]:
        """Append a line of JSON to `path`; lines that wait together take one `append_lines`. See `put`."""
        self.check()
        with self._lines_lock:
            if self._lines is None or self._lines.path != path:
                records = list[dict[str, Any]]()
                self._lines = _Lines(path, records, self._put(lambda: self._append(path, records)))
            self._lines.records.append(record)
            return self._lines.written

    def check(self) -> None:
        """Raise why a write has failed, if one has."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Wait until all is on disk that was put in. Raises why it is not."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait until nothing is left to write, and end the thread. A later write starts another."""
        self._pool.shutdown()
        self._pool = _thread()

    def _put(self, work: Callable[[], None]) -> Future[None]:
        self.check()
        self._last = self._pool.submit(self._run, work)
        return self._last

    def _run(self, work: Callable[[], None]) -> None:
        self.check()
        try:
            work()
        except BaseException as error:  # of any kind: the training thread raises it
            self._failure = error
            raise

    def _append(self, path: Path, records: list[dict[str, Any]]) -> None:
        with self._lines_lock:
            if self._lines is not None and self._lines.records is records:
                self._lines = None
        append_lines(path, records)
