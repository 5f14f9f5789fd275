"""Writes to disk in a thread of their own, so that no step waits for a disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainables.rundir import append_lines


@dataclass
class _Write:
    work: Callable[[], None]
    done: Future[None] = field(default_factory=Future)
    lines: tuple[Path, list[dict[str, Any]]] | None = None
    """Of a write of lines: the file, and the list that further lines may join until the write begins."""


class DiskWriter:
    """Carries out one write after the other, in their order: what was put in later is on disk later.

    So a record that may only follow its checkpoint is put in behind it. After a failure nothing more is written, and every
    later call raises it. The thread starts with the first write. Leaving the context waits until all is written.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue = deque[_Write]()
        self._last: Future[None] | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

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
        self.check()
        with self._changed:
            return self._put(_Write(work))

    def put_line(self, path: Path, record: dict[str, Any]) -> Future[None]:
        """Append a line of JSON to `path`; lines that wait together take one `append_lines`. See `put`."""
        self.check()
        with self._changed:
            waiting = self._queue[-1] if self._queue else None
            if waiting is not None and waiting.lines is not None and waiting.lines[0] == path:
                waiting.lines[1].append(record)
                return waiting.done
            records = [record]
            return self._put(_Write(lambda: append_lines(path, records), lines=(path, records)))

    def check(self) -> None:
        """Raise why a write has failed, if one has."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Wait until all is on disk that was put in. Raises why it is not."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait until nothing is left to write, and end the thread."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify()
        if thread is not None:
            thread.join()
        self._thread, self._closing = None, False

    def _put(self, write: _Write) -> Future[None]:
        self._queue.append(write)
        self._last = write.done
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="disk writer", daemon=True)
            self._thread.start()
        self._changed.notify()
        return write.done

    def _run(self) -> None:
        while (write := self._next()) is not None:
            try:
                self.check()
                write.work()
            except BaseException as error:  # of any kind: the training thread raises it
                self._failure = error
                write.done.set_exception(error)
            else:
                write.done.set_result(None)
            del write  # what it has to write may be large

    def _next(self) -> _Write | None:
        """The next write, off the queue; None: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue.popleft() if self._queue else None
