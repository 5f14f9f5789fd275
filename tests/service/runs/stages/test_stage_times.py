"""The time of a stage over its sessions, which its folder records."""

import contextlib
import time
from pathlib import Path

import pytest

from service.runs.outcome import Outcome
from service.runs.stages.stage_times import accounted_over_sessions, end_session, stage_session
from trainables.rundir import StageDir, append_line


def test_a_trials_times_are_those_of_all_its_sessions(tmp_path: Path) -> None:
    stage, now_s = StageDir(tmp_path), time.time()
    killed_s, resumed_s = now_s - 100.0, now_s - 20.0
    records = [("start", killed_s + 8.0), ("step", killed_s + 30.0), ("resume", resumed_s + 5.0), ("summary", now_s - 1.0)]
    for kind, at_s in records:
        append_line(stage.metrics, {"kind": kind, "time_ms": 1e3 * at_s, "metrics": {}})
    append_line(stage.sessions, {"began_s": killed_s})
    append_line(stage.sessions, {"began_s": resumed_s})
    outcome = accounted_over_sessions(Outcome(status="ok"), stage)
    assert outcome.seconds == pytest.approx(30.0 + 20.0, abs=1.0)
    assert outcome.start_s == pytest.approx(8.0 + 5.0, abs=0.1)
    assert outcome.end_s == pytest.approx(1.0, abs=1.0)
    stage.sessions.unlink()
    append_line(stage.sessions, {"began_s": resumed_s})
    assert accounted_over_sessions(Outcome(status="ok"), stage).seconds == pytest.approx(20.0, abs=1.0)


def test_a_session_that_its_driver_ended_counts_to_its_end_and_may_be_ended_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, clock_s = StageDir(tmp_path), [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock_s[0])
    with contextlib.suppress(KeyboardInterrupt), stage_session(stage):
        clock_s[0] += 7.0
        raise KeyboardInterrupt
    clock_s[0] += 1.0
    end_session(stage)  # of a trial: its own process and the sweep's driver each say so
    clock_s[0] += 500.0
    with stage_session(stage):
        clock_s[0] += 20.0
        assert accounted_over_sessions(Outcome(status="ok"), stage).seconds == pytest.approx(8.0 + 20.0)


@pytest.mark.parametrize("ahead_s", [-3600.0, -5.0, 5.0, 3600.0])
def test_no_time_is_negative_where_a_workers_clock_is_not_the_drivers(ahead_s: float, tmp_path: Path) -> None:
    stage, now_s = StageDir(tmp_path), time.time()
    for began_s, first, last in ((now_s - 60.0, "start", "step"), (now_s - 20.0, "resume", "summary")):
        append_line(stage.sessions, {"began_s": began_s})
        for kind, after_s in ((first, 8.0), (last, 19.0)):
            append_line(stage.metrics, {"kind": kind, "time_ms": 1e3 * (began_s + after_s + ahead_s), "metrics": {}})
    outcome = accounted_over_sessions(Outcome(status="ok"), stage)
    for seconds in (outcome.start_s or 0.0, outcome.end_s or 0.0):
        assert 0.0 <= seconds <= 60.5
    assert 20.0 <= outcome.seconds <= 60.5
