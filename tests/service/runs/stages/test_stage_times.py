"""The time of a stage over its sessions, which the run's log has."""

import time

import pytest

from service.runs.events import Event, event
from service.runs.outcome import Outcome
from service.runs.stages.stage_times import with_session_times
from tests.run_log import numbers


def at(kind: str, at_s: float) -> Event:
    """An event of a stage at this time."""
    time_ms = int(1e3 * at_s)
    if kind == "stage_begun":
        return event(kind, "student", model="mlp_small") | {"time_ms": time_ms}
    return numbers(kind, "student", 0, time_ms=time_ms)


def test_a_stages_times_are_those_of_all_its_sessions() -> None:
    now_s = time.time()
    killed_s, resumed_s = now_s - 100.0, now_s - 20.0
    first = [("stage_begun", killed_s), ("start", killed_s + 8.0), ("step", killed_s + 30.0)]
    second = [("stage_begun", resumed_s), ("resume", resumed_s + 5.0), ("summary", now_s - 1.0)]
    outcome = with_session_times(Outcome(status="ok"), [at(*each) for each in (*first, *second)])
    assert outcome.seconds == pytest.approx(30.0 + 20.0, abs=1.0)
    assert outcome.start_s == pytest.approx(8.0 + 5.0, abs=0.1)
    assert outcome.end_s == pytest.approx(1.0, abs=1.0)
    outcome = with_session_times(Outcome(status="ok"), [at(*each) for each in second])
    assert outcome.seconds == pytest.approx(20.0, abs=1.0)


@pytest.mark.parametrize("ahead_s", [-3600.0, -5.0, 5.0, 3600.0])
def test_no_time_is_negative_where_a_workers_clock_is_not_the_drivers(ahead_s: float) -> None:
    now_s, events = time.time(), list[Event]()
    for began_s, first, last in ((now_s - 60.0, "start", "step"), (now_s - 20.0, "resume", "summary")):
        events.append(at("stage_begun", began_s))
        events += [at(kind, began_s + after_s + ahead_s) for kind, after_s in ((first, 8.0), (last, 19.0))]
    outcome = with_session_times(Outcome(status="ok"), events)
    for seconds in (outcome.start_s or 0.0, outcome.end_s or 0.0):
        assert 0.0 <= seconds <= 60.5
    assert 20.0 <= outcome.seconds <= 60.5


def test_a_session_with_a_clock_behind_that_of_the_one_before_counts_nothing_of_it() -> None:
    begun = [event("stage_begun", "student", trial="0", model="m") for _ in range(2)]
    begun[0]["time_ms"] += 3_600_000
    assert with_session_times(Outcome(status="ok"), begun).seconds == pytest.approx(0, abs=5)
