"""Writes to disk in a thread of their own, so that no step waits for a disk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


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
        self.check()
        self._last = self._pool.submit(self._run, work)
        return self._last

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

    def _run(self, work: Callable[[], None]) -> None:
        self.check()
        try:
            work()
        except BaseException as error:  # of any kind: the training thread raises it
            self._failure = error
            raise
