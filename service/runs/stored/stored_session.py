"""The driver's session of a run in an object store: it holds the lease, and regularly uploads changed files for people."""

from __future__ import annotations

import _thread
import contextlib
import logging
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from service.runs.stored.driver_lease import DriverLease, LeaseLostError, check_lease, newest_driver
from service.runs.stored.segments import LogStore
from service.runs.stored.stored_runs import NOT_PUT, display_name, people_files, rebuild, uri_of
from trainables.errors import ExperimentError, StorageError
from trainables.locks import locked
from trainables.object_store.store import ObjectStore
from trainables.rundir import RunDir
from trainables.throttled import Throttled

PUT_FILES_EVERY_S = 30.0
MAX_PAUSE_S = 60.0
"""Longest pause after slow uploads, which may only have waited for a store that was down."""
ENDING_S = 10.0
"""How long an interrupted driver waits for a store that does not answer."""
_log = logging.getLogger("raydistill")


@contextlib.contextmanager
def stored_session(run_dir: RunDir, echo: Callable[[str], None]) -> Iterator[LogStore | None]:
    """Hold the lease of a run and upload its files inside the context. The caller holds the run's lock.

    Yields where the log is uploaded, or None if the run is in a folder.

    Raises:
        ExperimentError: another driver is working on the run.
        StorageError: files could not be uploaded.
    """
    if (uri := uri_of(run_dir.root)) is None:
        yield None
        return
    driver = _StoredDriver(uri, run_dir.root.absolute())
    try:
        log_store = driver.begin(echo)
        try:
            yield log_store
        except BaseException:
            driver.end(ENDING_S)
            raise
        driver.end(None)
    except StorageError as error:
        raise StorageError(f"{error}; continue with `distill resume {shlex.quote(uri)}`") from None


class _StoredDriver:
    """Uploads a run's files for people, some time after each has changed."""

    def __init__(self, uri: str, folder: Path) -> None:
        self._store, self._folder = ObjectStore(uri), folder
        self._lease = DriverLease(uri, folder, self._lose)
        self._ended, self._losing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="object store", daemon=True)
        self._put: dict[str, tuple[int, int]] = {}
        """Size and time of each uploaded file."""

    def begin(self, echo: Callable[[str], None]) -> LogStore:
        """Raises ExperimentError, StorageError: see `stored_session`."""
        self._lease.acquire(echo)
        try:
            file, not_put = RunDir(self._folder).experiment, self._folder / NOT_PUT
            begun = file.read_bytes() if file.exists() else None
            with locked(self._folder / ".copying"):
                if newest_driver(self._store):
                    rebuild(self._folder, self._store)
                    if not not_put.exists():
                        self._put = {name: self._state(name) for name in people_files(self._folder)}
                    if begun is not None and file.read_bytes() != begun:  # two machines began with the same --out
                        run = display_name(self._folder)
                        raise ExperimentError(
                            f"{run} already holds a run: continue it with `distill resume {shlex.quote(run)}`, "
                            "or choose another --out"
                        )
            not_put.touch()
            self.put_changed()
        except BaseException:
            self._lease.release()
            raise
        self._thread.start()
        return LogStore(self._store.uri, self._lease.number, self._lease.name)

    def end(self, limit_s: float | None) -> None:
        """Upload the rest, and release the lease. With a time limit, some files may be left out.

        Raises StorageError: there is no time limit, and the rest could not be uploaded.
        """
        if limit_s is not None:
            self._store.retry_s = limit_s
        self._ended.set()
        try:
            self._thread.join()
            self.put_changed()
            (self._folder / NOT_PUT).unlink(missing_ok=True)
        except (LeaseLostError, StorageError, OSError) as error:
            if limit_s is None:
                raise
            _log.warning("%s", error)
        finally:
            self._lease.release()

    def put_changed(self) -> None:
        """Upload files that have changed since their last upload.

        Raises:
            LeaseLostError: another driver has the run.
            StorageError: the upload failed.
            OSError: a local file cannot be read.
        """
        for name in people_files(self._folder):
            with contextlib.suppress(FileNotFoundError):  # it was just removed
                if self._put.get(name) != (state := self._state(name)):
                    check_lease(self._store, self._lease.name)
                    self._store.put(name, (self._folder / name).read_bytes())
                    self._put[name] = state

    def _state(self, name: str) -> tuple[int, int]:
        found = (self._folder / name).stat()
        return found.st_size, found.st_mtime_ns

    def _run(self) -> None:
        put_changed = Throttled(self.put_changed, pause_s=PUT_FILES_EVERY_S, max_pause_s=MAX_PAUSE_S)
        while not self._ended.wait(put_changed.wait_s()):
            try:
                put_changed()
            except LeaseLostError as error:
                self._lose(error)
                return
            except (StorageError, OSError) as error:
                _log.warning("%s; still trying", error)

    def _lose(self, error: LeaseLostError) -> None:
        if self._ended.is_set() or not self._losing.acquire(blocking=False):
            return  # the main thread is ending already, and a second interrupt would cut that short
        _log.warning("%s", error)
        _thread.interrupt_main()
