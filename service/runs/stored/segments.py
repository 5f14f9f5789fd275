"""The log of a run in an object store: `events/DRIVER-BEGIN-END.jsonl`, each a part of the log of one driver, put once.

A driver's log begins with all that the ones before it have left, and so does its first segment: a driver that was taken over may
put another one late, which nobody reads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from service.runs.event_log import EventLog
from service.runs.stored.driver_lease import SEGMENTS, Segment, is_taken_over, lease_lost, segments_of
from trainables.errors import ExperimentError
from trainables.object_store.store import ObjectStore

PUT_LOG_EVERY_S = 5.0
"""What a log has gained is put so late, if nothing must outlive the node before."""
MAX_SEGMENTS = 500
"""Then one takes the place of all: each has to be read."""
_THREADS = 16


class LogStore(NamedTuple):
    """Where a driver puts the log of its run."""

    uri: str
    driver: int
    lease: str


class SegmentWriter:
    """Puts what a log gains. One process at a time has it: the one that has the log."""

    def __init__(self, place: LogStore, log: EventLog) -> None:
        self.store, self._place, self._log = ObjectStore(place.uri), place, log
        self._put: list[Segment] | None = None
        """Those of this driver; None: not listed yet, as by a process that goes on with the log of another one."""
        self.end = 0
        """Offset in the log behind what was put."""

    def put(self) -> None:
        """Put what the log has and the store has not; once this has returned it outlives the node.

        Raises:
            LeaseLostError: another driver has the run.
            StorageError: the store does not take it.
        """
        others = list[Segment]()
        if self._put is None:
            found = segments_of(self.store)
            self._put = [each for each in found if each.driver == self._place.driver]
            others = [each for each in found if each.driver < self._place.driver]
            self.end = max((each.end for each in self._put), default=0)
        if (end := self._log.size) == self.end:
            return
        replaces = len(self._put) >= MAX_SEGMENTS
        segment = Segment(self._place.driver, 0 if replaces else self.end, end)
        self._check_lease()  # a later driver may have the same number, and read what is put under it
        self.store.put(segment.name, self._log.read(segment.begin, end))
        self._check_lease()  # which may be lost since: then what was put does not count
        self.end, replaced = end, [*others, *(self._put if replaces else [])]
        self._put = [segment] if replaces else [*self._put, segment]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda each: self.store.delete(each.name), replaced))

    def _check_lease(self) -> None:
        if is_taken_over(self.store, self._place.lease):
            raise lease_lost(self._place.uri)


def read_segments(store: ObjectStore) -> bytes | None:
    """The log of a run; None: it has none. Raises ExperimentError: parts of it are missing. Raises StorageError."""
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
    missing = f"{store.uri}/{SEGMENTS} lacks what is behind byte {end} of the log of driver {newest[-1].driver}"
    raise ExperimentError(f"{missing}: restore a copy, or start a new run")
