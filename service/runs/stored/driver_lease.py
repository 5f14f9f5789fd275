"""Leases that let only one driver at a time work on a run in an object store. A lease is an object that its driver renews.

This works in any store with consistent listings: a driver that writes its lease and then finds no other one is alone. Two
drivers that begin at the same moment see each other's lease, and both give up.
"""

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainables.errors import ExperimentError, StorageError
from trainables.object_store.store import Entry, ObjectStore
from trainables.rundir import write_atomic

FOLDER, SEGMENTS = ".drivers", "events"
_SEGMENT = re.compile(rf"{SEGMENTS}/(\d+)-(\d+)-(\d+)\.jsonl")
RENEW_S = 10.0
LEASE_S = 30.0
"""A lease that was not renewed for this long has expired: its driver is gone."""
_POLL_S = 1.0
_log = logging.getLogger("raydistill")


class LeaseLostError(ExperimentError):
    """Another driver has taken the run over."""


class DriverLease:
    """This process's lease of a run. Its `number` is larger than those of all earlier drivers."""

    def __init__(self, uri: str, folder: Path, lost: Callable[[LeaseLostError], None]) -> None:
        """`folder` is the run's scratch folder. `lost` is called from a thread if another driver takes over the run."""
        self._store, self._folder_id = ObjectStore(uri, RENEW_S), _id_of(folder)
        self.name, self.number = f"{FOLDER}/{secrets.token_hex(8)}", 0
        self._lost, self._ended, self._drives = lost, threading.Event(), False
        self._thread = threading.Thread(target=self._renew, name="driver's lease", daemon=True)

    def acquire(self, echo: Callable[[str], None]) -> None:
        """Acquire the lease, waiting for those of other drivers to expire. This process must hold the folder's lock.

        Raises:
            ExperimentError: another driver is working on the run.
            StorageError: the store does not answer.
        """
        self._put()
        self._thread.start()
        try:
            if others := self._others():
                self._wait_for_end(others, echo)
            self.number = 1 + max(self.number, newest_driver(self._store))
            self._drives = True
            self._put()
            check_lease(self._store, self.name)  # a driver may have begun while this process was paused
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self._store.delete(self.name)
        except StorageError as error:
            _log.warning("%s", error)

    def _put(self) -> None:
        driver: dict[str, Any] = {"folder": self._folder_id, "host": socket.gethostname(), "pid": os.getpid()}
        driver |= {"number": self.number, "drives": self._drives, "renewed_s": time.time()}
        self._store.put(self.name, json.dumps(driver).encode())

    def _others(self) -> dict[str, Entry]:
        """Return the leases of other drivers. Drivers with this folder are gone, since its lock was free."""
        others = {name: entry for name, entry in self._store.entries(FOLDER).items() if name != self.name}
        for name in list(others):
            content = _content(self._store, name)
            self.number = max(self.number, content.get("number", 0))
            if content.get("folder") == self._folder_id:
                self._store.delete(name)
                del others[name]
        return others

    def _wait_for_end(self, others: dict[str, Entry], echo: Callable[[str], None]) -> None:
        first = _content(self._store, next(iter(others)))
        driver = f"a driver on {first.get('host', 'another machine')} (process {first.get('pid', '?')})"
        echo(f"{driver} was running this: waiting {LEASE_S:g} s to see whether it still is")
        until = time.monotonic() + LEASE_S
        while time.monotonic() < until:
            time.sleep(_POLL_S)
            now = self._store.entries(FOLDER)
            if any(name in now and now[name] != entry for name, entry in others.items()) or {*now} - {*others, self.name}:
                raise ExperimentError(f"{self._store.uri} is already running in {driver}: wait for it, or end it first")
        for name in others:
            self._store.delete(name)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                if self._drives:
                    check_lease(self._store, self.name)
                self._put()
            except LeaseLostError as error:
                self._lost(error)
                return
            except StorageError as error:
                _log.warning("%s; still trying", error)


class Segment(NamedTuple):
    """A part of the log, bytes `[begin, end)` of one driver's. See `segments`."""

    driver: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        return f"{SEGMENTS}/{self.driver:04}-{self.begin:012}-{self.end:012}.jsonl"


def segments_of(store: ObjectStore) -> list[Segment]:
    """Return all segments in the store, in order. Raises StorageError."""
    found = (_SEGMENT.fullmatch(name) for name in store.entries(SEGMENTS))
    return sorted(Segment(*map(int, each.groups())) for each in found if each)


def newest_driver(store: ObjectStore) -> int:
    """Return the number of the newest driver that has uploaded a segment, or 0. Raises StorageError."""
    return max((each.driver for each in segments_of(store)), default=0)


def check_lease(store: ObjectStore, lease: str) -> None:
    """Check that the driver with this lease still has the run, as before each upload: a paused process may wake up much later.

    Raises:
        LeaseLostError: another driver has taken over the run.
        StorageError: the store does not answer.
    """
    names = store.entries(FOLDER)
    if lease not in names or any(_content(store, name).get("drives") for name in names if name != lease):
        raise LeaseLostError(f"another driver has taken over {store.uri}: stopping this one")


def _content(store: ObjectStore, name: str) -> dict[str, Any]:
    content = store.read(name)
    return {} if content is None else dict(json.loads(content))


def _id_of(folder: Path) -> str:
    """Return a unique id of a folder. It is stored in the folder, so it moves with it."""
    path = folder / ".folder-id"
    if not path.exists():
        write_atomic(path, secrets.token_hex(16).encode())
    return path.read_text(encoding="utf-8")


def is_fresh(uri: str) -> bool:
    """Whether a driver has renewed a lease of the run at `uri` recently, by the store's clock.

    Raises StorageError: the store does not answer.
    """
    store = ObjectStore(uri, RENEW_S)
    entries = store.entries(FOLDER)
    if not entries:
        return False
    now_s = _time_of(store)
    return any(entry.changed_ns / 1e9 > now_s - 2 * LEASE_S for entry in entries.values())


def _time_of(store: ObjectStore) -> float:
    """Return the store's unix time, or this machine's if the user may not write to the store."""
    name = f".clock/{secrets.token_hex(8)}"
    try:
        store.put(name, b"")
        entry = store.entries(".clock").get(name)
        store.delete(name)
    except StorageError:
        return time.time()
    return time.time() if entry is None else entry.changed_ns / 1e9
