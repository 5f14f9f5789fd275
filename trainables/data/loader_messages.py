"""What a loader process sends beside the results of its threads."""

from typing import NamedTuple


class FailedReads(NamedTuple):
    """In place of a batch's results: what reading it raised."""

    error: Exception
    cause: BaseException | None = None


class LogLine(NamedTuple):
    """Of a loader process, for the log of its worker."""

    level: int
    message: str
