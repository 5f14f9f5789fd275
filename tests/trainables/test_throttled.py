import time

import pytest

from trainables.throttled import Throttled


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_what_takes_long_is_done_at_most_a_tenth_of_the_time(clock: Clock) -> None:
    done_s = list[float]()

    def work() -> None:
        done_s.append(clock.now_s)
        clock.now_s += 1.0

    again = Throttled(work)
    while clock.now_s < 30.0:
        again()
        clock.now_s += 0.25
    assert done_s == [0.0, 10.0, 20.0]


def test_there_is_a_pause_before_each_time_and_a_limit_to_what_comes_on_top(clock: Clock) -> None:
    durations_s, waits_s = [0.0, 1.0, 100.0], list[float]()

    def work() -> None:
        clock.now_s += durations_s.pop(0)

    again = Throttled(work, pause_s=5.0, max_pause_s=60.0)
    again()
    assert len(durations_s) == 3  # too early
    while durations_s:
        waits_s.append(again.wait_s())
        clock.now_s += again.wait_s()
        again()
    assert [*waits_s, again.wait_s()] == [5.0, 5.0, 14.0, 65.0]


def test_what_raised_is_done_again_after_the_pause(clock: Clock) -> None:
    def work() -> None:
        clock.now_s += 100.0
        raise ConnectionResetError

    again = Throttled(work, pause_s=5.0)
    clock.now_s = 5.0
    with pytest.raises(ConnectionResetError):
        again()
    assert again.wait_s() == 5.0
