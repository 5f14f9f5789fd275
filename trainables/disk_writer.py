"""Write to disk in a separate thread, so that no training step waits for a disk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "disk writer")


class DiskWriter:
    """Runs writes one at a time, in order, so that a record put in after its checkpoint is never on disk before it.

    After a failure nothing more is written, and every later call raises it. The thread starts with the first write. Leaving the
    context waits for all writes.
    """

    def __init__(self) -> None:
        self._pool = _thread()
        self._last: Future[None] | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> DiskWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None:
            self.check()

    def put(self, work: Callable[[], None]) -> Future[None]:
        """Queue `work` after all earlier writes; the future resolves once it has run. Raises the exception of a failed write."""
        self.check()
        self._last = self._pool.submit(self._run, work)
        return self._last

    def check(self) -> None:
        """Raise the exception of a failed write, if there is one."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Wait until all queued writes are on disk. Raises the exception of a failed write."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait for all writes and end the thread. A later write starts another."""
        self._pool.shutdown()
        self._pool = _thread()

    def _run(self, work: Callable[[], None]) -> None:
        self.check()
        try:
            work()
        except BaseException as error:  # the training thread raises it again
            self._failure = error
            raise
