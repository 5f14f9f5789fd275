"""What a loader process sends. Of what comes with each batch the types are plain: a class takes as long as all else of it."""

from typing import NamedTuple

from trainables.data.encoded_rows import Region

Response = tuple[list[tuple[int, str]], list[Region], tuple[float, ...]]
"""The fields of a `ReadResult` for a whole batch; the last one those of its `ThreadTimes`."""


class FailedReads(NamedTuple):
    """In place of a batch's results: what reading it raised."""

    error: Exception
    cause: BaseException | None = None


class LogLine(NamedTuple):
    """Of a loader process, for the log of its worker."""

    level: int
    message: str
