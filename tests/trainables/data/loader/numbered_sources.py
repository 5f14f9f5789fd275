"""Sources for the loader's tests, as real as they need to be. A loader process imports this, and no torch with it."""

import hashlib
import logging
import os
import tempfile
import time

import numpy as np

from trainables.data.decode import Sample, UnreadableImageError
from trainables.data.interface import Source


class Counter:
    """Counts what happens in all processes that have it."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 — as long as the counter
        self._open(self._file.name)

    def _open(self, path: str) -> None:
        self._path, self._handle = path, os.open(path, os.O_WRONLY | os.O_APPEND)

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self._open(path)

    def __del__(self) -> None:
        os.close(self._handle)

    def add(self) -> None:
        os.write(self._handle, b".")

    def value(self) -> int:
        return os.fstat(self._handle).st_size


class SlowSource(Source):
    """A real source whose reads take 2 ms and are counted."""

    classes = ("only",)

    def __init__(self, num_samples: int) -> None:
        self.labels_N = np.zeros(num_samples, dtype=np.int64)
        self._reads = Counter()

    @property
    def num_reads(self) -> int:
        return self._reads.value()

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> Sample:
        time.sleep(0.002)
        self._reads.add()
        return np.zeros((2, 2, 3), dtype=np.uint8)


class TwinsSource(SlowSource):
    """All samples have one name, as in tars that number theirs each from 0 on; the first two are unreadable."""

    def name(self, index: int) -> str:
        return "0.jpg"

    def read(self, index: int) -> Sample:
        if index < 2:
            raise UnreadableImageError("not an image")
        return super().read(index)


class FailingSource(SlowSource):
    """A source that raises `error` at sample 13."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(4000)
        self._error = error

    def read(self, index: int) -> Sample:
        if index == 13:
            raise self._error
        return super().read(index)


class NumberedSource(SlowSource):
    """The pixels of sample i are all i mod 251, and its label is i."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.labels_N = np.arange(num_samples)

    def read(self, index: int) -> Sample:
        return np.full((2, 2, 3), index % 251, dtype=np.uint8)


class LoggingSource(NumberedSource):
    """A source that logs each of its reads."""

    def read(self, index: int) -> Sample:
        logging.getLogger("raydistill").warning("sample %d", index)
        return super().read(index)


class BusySource(SlowSource):
    """A real source that computes for 2 ms instead."""

    def read(self, index: int) -> Sample:
        until_s = time.thread_time() + 0.002
        while time.thread_time() < until_s:
            hashlib.sha256(bytes(100_000)).digest()  # without Python's lock
        return np.zeros((2, 2, 3), dtype=np.uint8)
