"""A run's log as its driver writes it: by itself, and while Ray runs through the recorder that its trials and workers have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cluster import local_ray
from service.runs.event_log import LOCK_WAIT_S, EventLog
from service.runs.events import OUTLIVES_NODE, Event, event
from service.runs.stored.segments import LogStore, SegmentWriter
from trainables.errors import ExperimentError, RecorderLostError

if TYPE_CHECKING:
    from trainables.worker.recorder import RunRecorder

LOST_WAIT_S = 3.0
"""How long a recorder may take to hand over the log; where its Ray is lost, that ends this process a few seconds later."""


class DriverLog:
    """The log of a run that this process carries out."""

    def __init__(self, path: Path, store: LogStore | None = None) -> None:
        """`store`: where the run is, if in an object store. Raises as `EventLog` does."""
        self.path, self._store = path, store
        self._file, self._segments = self._opened()
        self._recorder: RunRecorder | None = None

    @property
    def recorder(self) -> RunRecorder:
        """What trials and workers get; inside `recording`."""
        assert self._recorder is not None
        return self._recorder

    def record(self, kind: str, stage: str | None = None, **fields: Any) -> Event:
        """Write an event; returns it once it is durable.

        Raises:
            RayLostError, RecorderLostError: the Ray of the recorder, or that alone, has ended.
            OSError: the disk is full or cannot be written.
            LeaseLostError, StorageError: see `SegmentWriter.put`.
        """
        made = event(kind, stage, **fields)
        if self._recorder is None:
            self._file.append([made])
            if self._segments is not None and kind in OUTLIVES_NODE:
                self._segments.put()
        else:
            local_ray.check_ray()  # the recorder of one that is lost may be waited for without end
            self._recorder.record([made])
        return made

    def of(self, key: str) -> list[Event]:
        """See `EventLog.of`."""
        return self._file.of(key) if self._recorder is None else self._recorder.of(key)

    @contextlib.contextmanager
    def recording(self) -> Iterator[RunRecorder]:
        """Inside the context, which Ray outlasts, the recorder writes the log."""
        self._file.close()
        try:
            with recording(self.path, self._store) as self._recorder:
                yield self._recorder
        except BaseException:
            with contextlib.suppress(ExperimentError):  # what ended the context matters more than a log that nobody can write
                self._take_back()
            raise
        self._take_back()

    def _take_back(self) -> None:
        self._recorder = None
        self._file, self._segments = self._opened(LOST_WAIT_S if local_ray.is_lost() else LOCK_WAIT_S)

    def wait_for_store(self, seconds: float) -> None:
        """How long events wait from here on for an object store that does not answer."""
        if self._segments is not None:
            self._segments.store.retry_s = seconds

    def _opened(self, wait_s: float = LOCK_WAIT_S) -> tuple[EventLog, SegmentWriter | None]:
        file = EventLog(self.path, wait_s)
        return file, None if self._store is None else SegmentWriter(self._store, file)

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def recording(path: Path, store: LogStore | None = None) -> Iterator[RunRecorder]:
    """A recorder of the log at `path`, which it also puts to a store. It ends with the context, or with its Ray."""
    import ray

    from service.runs.recorder import start_recorder

    recorder = start_recorder(path, store)
    try:
        yield recorder
    finally:
        try:
            if not local_ray.is_lost():
                # All events that count were answered: these are lines of logs.
                with contextlib.suppress(ray.exceptions.RayError, RecorderLostError, TimeoutError):
                    recorder.flush(10)
        finally:  # also where a second Ctrl-C comes
            # The processes of a Ray that is lost live on for a while, and answer each other.
            with contextlib.suppress(ray.exceptions.RayError):
                recorder.close(LOST_WAIT_S)
            if not local_ray.is_lost():
                ray.kill(recorder.actor)
