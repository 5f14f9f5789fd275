"""One driver at a time for a run in an object store: each has a lease, an object that it renews.

Works in any store whose listing has every object that was put before it: who puts a lease and then finds no other is alone. Two
that begin in the same moment see each other's, and both give up.
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
"""A lease that was not renewed for so long is that of a driver that is gone."""
_POLL_S = 1.0
_log = logging.getLogger("raydistill")


class LeaseLostError(ExperimentError):
    """Another driver has taken the run over."""


class DriverLease:
    """This process's lease of a run. Its `number` is larger than that of every driver before it."""

    def __init__(self, uri: str, folder: Path, lost: Callable[[], None]) -> None:
        """`lost` is called, from a thread, where another driver has taken the run over. `folder`: where this one works on it."""
        self._store, self._folder_id = ObjectStore(uri, RENEW_S), _id_of(folder)
        self.name, self.number = f"{FOLDER}/{secrets.token_hex(8)}", 0
        self._lost, self._ended, self._drives, self._is_lost = lost, threading.Event(), False, False
        self._renewed_s = 0.0
        self._thread = threading.Thread(target=self._renew, name="driver's lease", daemon=True)

    def acquire(self, echo: Callable[[str], None]) -> None:
        """Wait until the leases of others have ended; the folder's own lock has to be this process's.

        Raises:
            ExperimentError: another driver works on the run.
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
            if self._is_taken_over():  # by one that did not see this one drive, since this process was paused meanwhile
                raise lease_lost(self._store.uri)
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

    def check(self) -> None:
        """To be called before each put: a process that was paused may wake long after its lease has ended.

        Raises:
            LeaseLostError: see there.
            StorageError: the lease has ended, and the store does not say whether another driver has the run.
        """
        # By the wall clock: the monotonic one stands still in a machine that sleeps.
        if not self._is_lost and not 0 <= time.time() - self._renewed_s <= LEASE_S:
            self._is_lost = self._is_taken_over()
        if self._is_lost:
            raise lease_lost(self._store.uri)

    def _put(self) -> None:
        began_s = time.time()
        driver: dict[str, Any] = {"folder": self._folder_id, "host": socket.gethostname(), "pid": os.getpid()}
        driver |= {"number": self.number, "drives": self._drives, "renewed_s": began_s}
        self._store.put(self.name, json.dumps(driver).encode())
        self._renewed_s = began_s

    def _others(self) -> dict[str, Entry]:
        """The leases of other drivers; those in this folder are gone, since its lock was free."""
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
        echo(f"{driver} had this run: waiting {LEASE_S:g} s to see whether it still has")
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
                if self._drives and self._is_taken_over():
                    self._is_lost = True
                    self._lost()
                    return
                self._put()
            except StorageError as error:
                _log.warning("%s; still trying", error)

    def _is_taken_over(self) -> bool:
        return is_taken_over(self._store, self.name)


class Segment(NamedTuple):
    """A part of the log, see `segments`."""

    driver: int
    begin: int
    end: int
    """Bytes of the driver's log."""

    @property
    def name(self) -> str:
        return f"{SEGMENTS}/{self.driver:04}-{self.begin:012}-{self.end:012}.jsonl"


def segments_of(store: ObjectStore) -> list[Segment]:
    """All that are there, in order. Raises StorageError."""
    found = (_SEGMENT.fullmatch(name) for name in store.entries(SEGMENTS))
    return sorted(Segment(*map(int, each.groups())) for each in found if each)


def newest_driver(store: ObjectStore) -> int:
    """The number of the driver that has put a part of the log last; 0: none has. Raises StorageError."""
    return max((each.driver for each in segments_of(store)), default=0)


def lease_lost(uri: str) -> LeaseLostError:
    return LeaseLostError(f"another driver has taken over {uri}: this one ends")


def is_taken_over(store: ObjectStore, lease: str) -> bool:
    """Whether another driver works on the run than the one with this lease. Raises StorageError."""
    names = store.entries(FOLDER)
    return lease not in names or any(_content(store, name).get("drives") for name in names if name != lease)


def _content(store: ObjectStore, name: str) -> dict[str, Any]:
    content = store.read(name)
    return {} if content is None else dict(json.loads(content))


def _id_of(folder: Path) -> str:
    """What distinguishes a folder from those of all other machines; it goes where the folder goes."""
    path = folder / ".folder-id"
    if not path.exists():
        write_atomic(path, secrets.token_hex(16).encode())
    return path.read_text(encoding="utf-8")


def is_fresh(uri: str) -> bool:
    """Whether a driver has renewed a lease of the run at `uri` of late, by the store's clock.

    Raises StorageError: the store does not answer.
    """
    store = ObjectStore(uri, RENEW_S)
    entries = store.entries(FOLDER)
    if not entries:
        return False
    now_s = _time_of(store)
    return any(entry.changed_ns / 1e9 > now_s - 2 * LEASE_S for entry in entries.values())


def _time_of(store: ObjectStore) -> float:
    """Unix time by the store's clock; by this machine's where the store lets nothing be written, as to who only reads."""
    name = f".clock/{secrets.token_hex(8)}"
    try:
        store.put(name, b"")
        entry = store.entries(".clock").get(name)
        store.delete(name)
    except StorageError:
        return time.time()
    return time.time() if entry is None else entry.changed_ns / 1e9
