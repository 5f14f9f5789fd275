import errno
import time
from collections.abc import Callable

import pytest

from trainables.errors import DataError, StorageError, StorageUnavailableError
from trainables.object_store import retries
from trainables.object_store.retries import NotRetriedError, with_retries

WHAT = "s3://bucket/x cannot be read"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_S", 0.01)


def failing(*errors: Exception) -> Callable[[], int]:
    """An attempt that raises these, one after the other, and returns how many they were."""
    left = list(errors)

    def attempt() -> int:
        if left:
            raise left.pop(0)
        return len(errors)

    return attempt


def test_what_passes_is_tried_again_with_growing_pauses() -> None:
    began_s = time.monotonic()
    assert with_retries(failing(*[OSError("503")] * 3), WHAT, lambda: 60.0) == 3
    assert time.monotonic() - began_s >= 0.01 + 0.02 + 0.04


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("When reading x: AWS Error ACCESS_DENIED during GetObject: No.\nmore"), "ACCESS_DENIED during GetObject: No."),
        (FileNotFoundError("https://server/x"), "there is no such file, or no server answers"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (ValueError(), "ValueError"),
    ],
)
def test_what_will_not_change_is_one_line_at_once(error: Exception, reason: str) -> None:
    with pytest.raises(StorageError) as raised:
        with_retries(failing(error), WHAT, lambda: 60.0)
    assert str(raised.value) == f"{WHAT}: {reason}"
    assert not isinstance(raised.value, StorageUnavailableError)


def test_a_limit_that_falls_while_it_is_waited_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_S", 60.0)
    limits_s = iter([60.0, 60.0])
    with pytest.raises(StorageUnavailableError, match=f"^{WHAT}: no answer"):
        with_retries(failing(OSError("no answer"), OSError("no answer")), WHAT, lambda: next(limits_s, 0.0))


def test_an_attempt_that_came_further_begins_the_time_anew() -> None:
    errors, done_bytes = [OSError("reset")] * 3, iter(range(1, 100))
    with pytest.raises(StorageUnavailableError):
        with_retries(failing(*errors), WHAT, lambda: 0.005)
    assert with_retries(failing(*errors), WHAT, lambda: 0.005, done_bytes=lambda: next(done_bytes)) == 3


@pytest.mark.parametrize("error", [DataError("of ours"), NotRetriedError(), OSError(errno.ENOSPC, "No space left on device")])
def test_what_is_not_the_servers_leaves_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        with_retries(failing(error), WHAT, lambda: 60.0)
    assert raised.value is error


def test_a_pause_ends_where_nobody_needs_the_answer_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_S", 60.0)

    def stop() -> None:
        raise NotRetriedError

    with pytest.raises(NotRetriedError):
        with_retries(failing(OSError("503")), WHAT, lambda: 60.0, check_stopped=stop)
