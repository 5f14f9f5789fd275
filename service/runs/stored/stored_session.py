"""The driver of a run in an object store: alone by its lease, it puts what it writes and brings what workers write elsewhere."""

from __future__ import annotations

import _thread
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from service.runs.run_directory import already_begun, locked_run
from service.runs.stored.driver_lease import DriverLease, LeaseLostError
from service.runs.stored.stored_runs import is_of_driver_too, stages, uri_of
from trainables.errors import ExperimentError, StorageError
from trainables.object_store.run_copy import OWNER, RunCopy, is_of_workers, put_order, stage_of
from trainables.object_store.store import OPENING_S, Entry
from trainables.paced import Paced
from trainables.rundir import RunDir

EVERY_S = 5.0
_ENDING_S = 10.0
_LONGEST_WAIT_S = 60.0
"""Where the store was slow: some of the time may have been that of a store that was gone."""
_log = logging.getLogger("raydistill")


@contextlib.contextmanager
def stored_session(run_dir: RunDir, echo: Callable[[str], None]) -> Iterator[None]:
    """Around a driver's work on a run, whose lock it has; nothing where the run is in a folder.

    Raises:
        ExperimentError: another driver works on the run.
        StorageError: what the driver wrote could not be put.
    """
    if (uri := uri_of(run_dir.root)) is None:
        yield
        return
    driver = StoredDriver(RunCopy(uri, run_dir.root.absolute()))
    driver.begin(echo)
    try:
        yield
    except BaseException:
        driver.end(_ENDING_S)
        raise
    driver.end(None)


def put_rest(run_dir: RunDir, echo: Callable[[str], None]) -> None:
    """Put what the store did not take of a run that ended in this folder, if it did. Raises as `stored_session` does."""
    if (uri := uri_of(run_dir.root)) is None:
        return
    copy = RunCopy(uri, run_dir.root, OPENING_S)
    if copy.owner() == copy.folder_id():
        with locked_run(run_dir), stored_session(run_dir, echo):
            pass


class StoredDriver:
    """Puts the driver's files of a run, a few seconds after each changed, and brings here what workers on other nodes put."""

    def __init__(self, copy: RunCopy) -> None:
        self._copy = copy
        self._lease = DriverLease(copy, self._lose)
        self._ended, self._losing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="object store", daemon=True)
        self._put: dict[str, tuple[int, int]] = {}
        """Size and time of each file as it was put."""
        self._fetched: dict[str, dict[str, Entry]] = {}
        """What the last listing had of each stage."""

    def begin(self, echo: Callable[[str], None]) -> None:
        """Raises ExperimentError, StorageError: see `stored_session`."""
        self._lease.acquire(echo)
        try:
            if "events.jsonl" not in self._copy.store.entries():  # one that died as it began has no run there to continue
                self._copy.store.delete(OWNER)
            begun = self._experiment()
            self._copy.own("", lambda name: not is_of_workers(name))
            if begun is not None and self._experiment() != begun:  # two machines began with the same --out
                raise ExperimentError(already_begun(self._copy.folder))
            for name in self._copy.files():  # which are in the store now, and nobody else writes
                if not is_of_workers(name):
                    found_now = (self._copy.folder / name).stat()
                    self._put[name] = found_now.st_size, found_now.st_mtime_ns
            self._fetch_stages()
        except BaseException:
            self._lease.release()
            raise
        self._thread.start()

    def _experiment(self) -> bytes | None:
        path = RunDir(self._copy.folder).experiment
        return path.read_bytes() if path.exists() else None

    def end(self, limit_s: float | None) -> None:
        """Put the rest, and let others have the run. With a limit, it is left to a resume what could not be put by then.

        Raises StorageError: without a limit, the rest could not be put.
        """
        if limit_s is not None:
            self._copy.store.retry_s = limit_s
        self._ended.set()
        try:
            self._thread.join()
            self.put_changed()
        except LeaseLostError:
            if limit_s is None:
                raise
        except (StorageError, OSError) as error:
            message = f"{error}; the rest is in {self._copy.folder}: continue with `distill resume {self._copy.store.uri}`"
            if limit_s is None:
                raise StorageError(message) from None
            _log.warning("%s", message)
        finally:
            self._lease.release()

    def put_changed(self) -> None:
        """Put what has changed since it was put last.

        Raises:
            LeaseLostError: another driver has the run.
            StorageError: the store does not take it.
            OSError: a file of this machine cannot be read.
        """
        names = [name for name in self._copy.files() if not is_of_workers(name)]
        # These say that others are complete: they are read before them, and put behind them.
        results = sorted((name for name in names if put_order(name) != put_order("")), key=put_order)
        last = {name: self._changed(name) for name in results}
        for name in names:
            if name not in last:
                self._put_one(name, self._changed(name))
        for name, changed in last.items():
            self._put_one(name, changed)

    def _changed(self, name: str) -> tuple[tuple[int, int], bytes] | None:
        """A file's size and time, and its content; None where it was put, or is gone."""
        try:
            found = (self._copy.folder / name).stat()
            state = found.st_size, found.st_mtime_ns
            return None if self._put.get(name) == state else (state, (self._copy.folder / name).read_bytes())
        except FileNotFoundError:
            return None

    def _put_one(self, name: str, changed: tuple[tuple[int, int], bytes] | None) -> None:
        if changed is not None:
            state, content = changed
            self._lease.check()
            self._copy.store.put(name, content)
            self._put[name] = state

    def _fetch_stages(self) -> None:
        entries = self._copy.store.entries()
        by_stage: dict[str, dict[str, Entry]] = {part: {} for part in stages(entries)}
        for name, entry in entries.items():
            part = name.removesuffix(f"/{OWNER}") if name.endswith(f"/{OWNER}") else stage_of(name)
            if part in by_stage and (is_of_driver_too(name) or name.endswith(f"/{OWNER}")):
                by_stage[part][name] = entry
        for part, found in by_stage.items():
            if found == self._fetched.get(part):
                continue
            self._copy.fetch(part, is_of_driver_too)
            self._fetched[part] = found

    def _run(self) -> None:
        keep_equal = Paced(self._put_and_fetch, pause_s=EVERY_S, most_s=_LONGEST_WAIT_S)
        while not self._ended.wait(keep_equal.wait_s()):
            try:
                keep_equal()
            except LeaseLostError:
                self._lose()
                return
            except (StorageError, OSError) as error:
                _log.warning("%s; still trying", error)

    def _put_and_fetch(self) -> None:
        self.put_changed()
        self._fetch_stages()

    def _lose(self) -> None:
        if self._ended.is_set() or not self._losing.acquire(blocking=False):
            return  # the main thread ends already: a second interrupt would cut that short
        _log.warning("another driver has taken over %s: this one ends", self._copy.store.uri)
        _thread.interrupt_main()
