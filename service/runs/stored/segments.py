"""The log of a run in an object store: segments `events/DRIVER-BEGIN-END.jsonl`, each a part of one driver's log, never changed.

A driver's log, and so its first segment, begins with the logs of all earlier drivers. If a driver that was replaced uploads
another segment late, it is ignored.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from service.runs.event_log import EventLog
from service.runs.stored.driver_lease import SEGMENTS, Segment, check_lease, segments_of
from trainables.errors import ExperimentError
from trainables.object_store.store import ObjectStore

PUT_LOG_EVERY_S = 5.0
"""Delay of uploads of events that need not outlive the node."""
MAX_SEGMENTS = 500
"""At this number one segment replaces all others, since reading the log reads each."""
_THREADS = 16


class LogStore(NamedTuple):
    """Where a driver uploads the log of its run."""

    uri: str
    driver: int
    lease: str


class SegmentWriter:
    """Uploads new parts of a log, from the one process that writes the log."""

    def __init__(self, log_store: LogStore, log: EventLog) -> None:
        self.store, self._log_store, self._log = ObjectStore(log_store.uri), log_store, log
        self._put: list[Segment] | None = None
        """This driver's segments, or None before this process has listed them."""
        self.end = 0
        """Offset in the log up to which it is uploaded."""

    def put(self) -> None:
        """Upload the part of the log that the store lacks. Once this returns, the log survives the loss of the node.

        Raises:
            LeaseLostError: another driver has the run.
            StorageError: the upload failed.
        """
        others = list[Segment]()
        if self._put is None:
            found = segments_of(self.store)
            self._put = [each for each in found if each.driver == self._log_store.driver]
            others = [each for each in found if each.driver < self._log_store.driver]
            self.end = max((each.end for each in self._put), default=0)
        if (end := self._log.size) == self.end:
            return
        replaces = len(self._put) >= MAX_SEGMENTS
        segment = Segment(self._log_store.driver, 0 if replaces else self.end, end)
        check_lease(self.store, self._log_store.lease)  # a later driver may have the same number, and would read this segment
        self.store.put(segment.name, self._log.read(segment.begin, end))
        check_lease(self.store, self._log_store.lease)  # if it is lost by now, the segment does not count
        self.end, replaced = end, [*others, *(self._put if replaces else [])]
        self._put = [segment] if replaces else [*self._put, segment]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda each: self.store.delete(each.name), replaced))


def read_segments(store: ObjectStore) -> bytes | None:
    """Return the log of a run, or None. Raises ExperimentError: parts of it are missing. Raises StorageError."""
    for _ in range(3):
        found = segments_of(store)
        newest = [each for each in found if each.driver == found[-1].driver]
        parts, end = [], 0
        while following := [each for each in newest if each.begin <= end < each.end]:
            longest = max(following, key=lambda each: each.end)
            parts.append((longest, end - longest.begin))
            end = longest.end
        if not newest:
            return None
        with ThreadPoolExecutor(_THREADS) as pool:
            contents = list(pool.map(lambda part: store.read(part[0].name), parts))
        if None not in contents and end == max(each.end for each in newest):
            return b"".join(content[skip:] for content, (_, skip) in zip(contents, parts, strict=True) if content)
    missing = f"{store.uri}/{SEGMENTS} lacks the part after byte {end} of the log of driver {newest[-1].driver}"
    raise ExperimentError(f"{missing}: restore a copy, or start a new run")
