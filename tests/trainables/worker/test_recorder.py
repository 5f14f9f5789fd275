"""How a worker's events and lines of logs come to the recorder: in order, bounded, and none in silence."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.waiting import wait_until
from trainables.errors import RecorderLostError
from trainables.worker import recorder
from trainables.worker.recorder import Outbox, Text


class SlowLog:
    """What an outbox writes to, which waits in each call until it may go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.calls: list[list[Any]] = []
        self.failure: Exception | None = None

    def record(self, events: Sequence[dict[str, Any]], texts: Sequence[Text]) -> None:
        self.calls.append([*(event["step"] for event in events), *texts])
        assert self.go_on.wait(30)
        if self.failure is not None:
            raise self.failure


def test_events_wait_for_room_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_WAITING", 10)
    log = SlowLog()
    outbox = Outbox(log.record)
    written = []
    thread = threading.Thread(target=lambda: written.extend(outbox.put({"step": step}) for step in range(25)))
    thread.start()
    wait_until(lambda: len(written) == 10)
    thread.join(0.1)
    assert len(written) == 10, "a step waits as long as there is no room"
    log.go_on.set()
    thread.join(10)
    for each in written:
        each.result(10)
    assert [step for call in log.calls for step in call] == list(range(25))


def test_lines_that_find_no_room_are_counted_in_the_file_and_the_others_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_WAITING", 3)
    log = SlowLog()
    outbox = Outbox(log.record)
    outbox.put_text("train.log", "0\n")
    wait_until(lambda: log.calls)
    for line in range(1, 8):
        outbox.put_text("train.log", f"{line}\n")
    log.go_on.set()
    outbox.flush(10)
    assert "".join(text for call in log.calls for _, text in call) == (
        "0\n1\n2\n3\n(4 lines are left out: the log was written too slowly)\n"
    )


def test_nothing_is_written_behind_an_event_that_could_not_be_and_lines_of_logs_end_nothing() -> None:
    log = SlowLog()
    log.go_on.set()
    outbox, log.failure = Outbox(log.record), OSError(28, "No space left on device")
    outbox.put_text("train.log", "a line\n")
    with pytest.raises(OSError, match="No space"):
        outbox.flush(10)
    log.failure = None
    outbox.put({"step": 1}).result(10)
    log.failure = RecorderLostError("it has died")
    with pytest.raises(RecorderLostError, match="it has died"):
        outbox.put({"step": 2}).result(10)
    log.failure = None
    with pytest.raises(RecorderLostError):
        outbox.put({"step": 3}).result(10)
    assert [call for call in log.calls if 3 in call] == []
