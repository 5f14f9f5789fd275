"""Retry operations on a server until one succeeds. All waiting for servers in this package goes through here."""

import errno
import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

from trainables.errors import DistillError, StorageError, StorageUnavailableError
from trainables.redact import redact

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_POLL_S = 0.1
_PERMANENT = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_BUCKET|INVALID_BUCKET|UNAUTHORIZED|FORBIDDEN"
    r"|HTTP status 40[13]|Unable to load lib|No credentials",
    re.I,
)
_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of this machine's disk, never of the server."""
_SDK_PREFIX = re.compile(r"^.*?AWS Error (?=\w)")
_log = logging.getLogger("raydistill")
T = TypeVar("T")


class NotRetriedError(Exception):
    """Stops the attempts and propagates unchanged: the server cannot fix it."""


def with_retries(
    attempt: Callable[[], T],
    what: str,
    limit_s: Callable[[], float],
    *,
    check_stopped: Callable[[], None] = lambda: None,
    done_bytes: Callable[[], int] = lambda: 0,
) -> T:
    """Call `attempt` until it succeeds, with growing pauses, for `limit_s()` after the first failure. Returns its result.

    The limit may change during the wait. A failed attempt that advanced `done_bytes` resets the time and the pauses. Messages
    begin with `what`, as in `s3://bucket/x cannot be read`.

    Raises:
        StorageUnavailableError: no attempt succeeded within the limit.
        StorageError: the server's answer will not change.
        OSError: a disk of this machine is full or read-only.
        DistillError, NotRetriedError: from an attempt, or from `check_stopped`, which is called during pauses.
    """
    wait_s, failed_at, reached_bytes = _FIRST_WAIT_S, None, 0
    while True:
        try:
            return attempt()
        except (DistillError, NotRetriedError):
            raise
        except Exception as error:  # file system libraries raise exceptions of any type
            if isinstance(error, OSError) and error.errno in _LOCAL:
                raise
            now = time.monotonic()
            if failed_at is None or done_bytes() > reached_bytes:
                wait_s, failed_at, reached_bytes = _FIRST_WAIT_S, now, done_bytes()
            reason = _reason(error)
            is_permanent = _is_permanent(error)
            if is_permanent or now - failed_at >= limit_s():
                tried = f" for {now - failed_at:.0f} s" if now - failed_at >= 1 else ""
                raise (StorageError if is_permanent else StorageUnavailableError)(f"{what}{tried}: {reason}") from None
            _log.warning("%s, trying again in %g s: %s", what, wait_s, reason)
        while (left_s := min(now + wait_s, failed_at + limit_s()) - time.monotonic()) > 0:
            check_stopped()
            time.sleep(min(left_s, _POLL_S))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _is_permanent(error: Exception) -> bool:
    """Whether a later attempt would fail with the same error."""
    return isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError) or bool(
        _PERMANENT.search(str(error))
    )


def _reason(error: Exception) -> str:
    """Summarize a library's error in one line; the AWS SDK's prefix is cut off."""
    text = str(error)
    if isinstance(error, OSError) and error.errno and error.strerror:
        text = error.strerror
    elif isinstance(error, FileNotFoundError):  # over HTTP its text is only the address, even if no server answers
        text = "there is no such file, or no server answers"
    line = (text.splitlines() or [type(error).__name__])[0]
    return redact(_SDK_PREFIX.sub("", line))
