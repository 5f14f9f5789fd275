"""The driver's access to a run's log: it writes the file itself, or while Ray runs through the recorder actor."""

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
"""How long a recorder may take to release the log. It is short because a lost Ray ends this process a few seconds later."""


class DriverLog:
    """The log of a run that this process drives."""

    def __init__(self, path: Path, store: LogStore | None = None) -> None:
        """`store` is set if the run is in an object store. Raises what `EventLog` raises."""
        self.path, self._store = path, store
        self._file, self._segments = self._opened()
        self._recorder: RunRecorder | None = None

    @property
    def recorder(self) -> RunRecorder:
        """The recorder for trials and workers; only inside `recording`."""
        assert self._recorder is not None
        return self._recorder

    def record(self, kind: str, stage: str | None = None, **fields: Any) -> None:
        """Write an event. Returns once it is durable.

        Raises:
            RayLostError, RecorderLostError: the recorder has ended with its Ray, or alone.
            OSError: the disk is full or cannot be written.
            LeaseLostError, StorageError: see `SegmentWriter.put`.
        """
        made = event(kind, stage, **fields)
        if self._recorder is None:
            self._file.append([made])
            if self._segments is not None and kind in OUTLIVES_NODE:
                self._segments.put()
        else:
            local_ray.check_ray()  # the recorder of a lost Ray might never answer
            self._recorder.record([made])

    def of(self, key: str) -> list[Event]:
        """See `EventLog.of`."""
        return self._file.of(key) if self._recorder is None else self._recorder.of(key)

    @contextlib.contextmanager
    def recording(self) -> Iterator[RunRecorder]:
        """Let a recorder write the log inside the context. Ray must outlive the context."""
        self._file.close()
        try:
            with recording(self.path, self._store) as self._recorder:
                yield self._recorder
        except BaseException:
            with contextlib.suppress(ExperimentError):  # the original error matters more than a log that cannot be opened
                self._take_back()
            raise
        self._take_back()

    def _take_back(self) -> None:
        self._recorder = None
        self._file, self._segments = self._opened(LOST_WAIT_S if local_ray.is_lost() else LOCK_WAIT_S)

    def wait_for_store(self, seconds: float) -> None:
        """Set how long events wait from now on for an object store that does not answer."""
        if self._segments is not None:
            self._segments.store.retry_s = seconds

    def _opened(self, wait_s: float = LOCK_WAIT_S) -> tuple[EventLog, SegmentWriter | None]:
        file = EventLog(self.path, wait_s)
        return file, None if self._store is None else SegmentWriter(self._store, file)

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def recording(path: Path, store: LogStore | None = None) -> Iterator[RunRecorder]:
    """Start a recorder for the log at `path`, which also uploads it to `store`. It ends with the context, or with its Ray."""
    import ray

    from service.runs.recorder import start_recorder

    recorder = start_recorder(path, store)
    try:
        yield recorder
    finally:
        try:
            if not local_ray.is_lost():
                # All events were answered; this only waits for lines of `logs/`.
                with contextlib.suppress(ray.exceptions.RayError, RecorderLostError, TimeoutError):
                    recorder.flush(10)
        finally:  # also after a second Ctrl-C
            # Processes of a lost Ray live on for a while, and still answer.
            with contextlib.suppress(ray.exceptions.RayError):
                recorder.close(LOST_WAIT_S)
            if not local_ray.is_lost():
                ray.kill(recorder.actor)
