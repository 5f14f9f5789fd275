"""The stages of a run: the time that each took, over all sessions that carried it out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from service.cluster.resources import local_capacity
from service.config.experiment import load
from service.report import reporter
from service.runs import stages
from service.runs.assignment import Assignment
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.run_directory import begin
from service.runs.session import Session, open_session
from service.runs.stages import record_stage, run_stage
from trainables.rundir import RunDir, StageDir, append_line

RESOLVED = load("digits", ["tracking.enabled=false"])


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.root.mkdir()
    begin(RESOLVED, "train", found, tmp_path)
    return found


def assignment_of(session: Session, name: str) -> Assignment:
    return Plan.on(session.experiment, local_capacity()).assign(name, session.run_dir, {})


def test_the_times_of_a_stage_are_those_of_all_its_sessions(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(assignment: Assignment) -> Outcome:
        stage = StageDir(Path(assignment.config.output_dir))
        append_line(stage.metrics, {"kind": "start", "time_ms": 1e3 * (time.time() + 2), "metrics": {}})
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "run_to_end", interrupted)
    run_dir.stage("student").root.mkdir()
    with pytest.raises(KeyboardInterrupt), open_session(RESOLVED, run_dir, reporter) as session:
        run_stage(session, assignment_of(session, "student"))
    with open_session(RESOLVED, run_dir, reporter) as session:
        record_stage(
            session,
            assignment_of(session, "student"),
            Outcome(status="failed", reason="a worker died", seconds=50.0, start_s=10.0),
        )
    with open_session(RESOLVED, run_dir, reporter) as session:
        record_stage(session, assignment_of(session, "student"), Outcome(status="ok", seconds=30.0, start_s=None))
    with open_session(RESOLVED, run_dir, reporter) as session:  # complete: it is not carried out again
        record_stage(session, assignment_of(session, "student"), Outcome(status="ok", seconds=0.1))
    (stage,) = json.loads(run_dir.result.read_text())["stages"]
    assert stage["status"] == "ok"
    assert 80.0 <= stage["seconds"] < 90.0
    assert stage["start_s"] == pytest.approx(12.0, abs=0.5)
