"""Measure the run-queue delay of threads (waiting for a free core) from Linux's scheduler statistics."""

import os
import threading
from io import FileIO


class _SchedulerStatistics(FileIO):
    """The scheduler statistics of the thread that opens the file; closed when that thread is gone."""

    def __init__(self) -> None:
        super().__init__("/proc/thread-self/schedstat")

    def __del__(self) -> None:
        self.close()


class CoreWait(threading.local):
    """Measures how long the calling thread has waited for a free core since it started."""

    def __init__(self) -> None:
        try:
            self._file: _SchedulerStatistics | None = _SchedulerStatistics()
        except OSError:
            self._file = None

    def seconds(self) -> float:
        """Return the wait in seconds; always 0 on systems without such statistics."""
        return int(os.pread(self._file.fileno(), 80, 0).split()[1]) / 1e9 if self._file else 0.0
