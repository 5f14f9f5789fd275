"""How long threads wait for a free core, from Linux's scheduler statistics; 0 where a system has none."""

import os
import threading
from io import FileIO


class _SchedulerStatistics(FileIO):
    """Linux's scheduler statistics of the thread that opens it, whoever reads them; closed when that thread is gone."""

    def __init__(self) -> None:
        super().__init__("/proc/thread-self/schedstat")

    def __del__(self) -> None:
        self.close()


class CoreWait(threading.local):
    """How long the calling thread has waited for a free core since it began."""

    def __init__(self) -> None:
        try:
            self._file: _SchedulerStatistics | None = _SchedulerStatistics()
        except OSError:
            self._file = None

    def seconds(self) -> float:
        """0 always where the system has no such statistics."""
        return int(os.pread(self._file.fileno(), 80, 0).split()[1]) / 1e9 if self._file else 0.0
