"""The stages of a run: the time that each took, over all sessions that carried it out, and the teacher of a timing run."""

import json
import shutil
import time
from pathlib import Path

import pytest

from service.cluster.resources import local_capacity
from service.config.experiment import load
from service.report import end_of_run
from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.run_directory import begin_run
from service.runs.session import Session, open_session
from service.runs.stages import run_stages
from service.runs.stages.assignment import Assignment
from service.runs.stages.run_stages import prepare_teacher, run_stage
from service.runs.trial import finished
from tests.run_log import LocalRecorder, events_of, numbers, result_of
from trainables.errors import TrainingError
from trainables.models.weights import load_teacher
from trainables.rundir import RunDir, write_atomic

RESOLVED = load("digits", ["tracking.enabled=false"])


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.root.mkdir()
    begin_run(RESOLVED, "train", found, tmp_path)
    return found


def assignment_of(session: Session, name: str) -> Assignment:
    return Plan.on(session.experiment, local_capacity()).assign(name, session.run_dir, {})


def test_the_times_of_a_stage_are_those_of_all_its_sessions(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock_s[0])
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * clock_s[0]))

    def work(start_s: float, seconds: float, end: Outcome | type[BaseException]) -> None:
        """A session whose workers start after `start_s`, and that ends `seconds` later as `end` says."""
        clock_s[0] += 500.0

        def run_to_end(assignment: Assignment) -> Outcome:
            clock_s[0] += start_s
            if seconds:
                assignment.log.record([numbers("start", "student", 0, time_ms=int(1e3 * clock_s[0]), max_steps=9)])
                clock_s[0] += seconds
                assignment.log.record([numbers("step", "student", int(clock_s[0]), time_ms=int(1e3 * clock_s[0]))])
            if isinstance(end, Outcome):
                return end
            raise end

        monkeypatch.setattr(run_stages, "run_to_end", run_to_end)
        with open_session(RESOLVED, run_dir, end_of_run) as session:
            session.log._recorder = LocalRecorder(run_dir.root, session.log._file)
            run_stage(session, assignment_of(session, "student"))

    with pytest.raises(KeyboardInterrupt):
        work(2.0, 8.0, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        work(3.0, 0.0, KeyboardInterrupt)  # while the workers start
    with pytest.raises(TrainingError):
        work(10.0, 40.0, Outcome(status="failed", reason="a worker died"))
    work(5.0, 25.0, Outcome(status="ok"))
    work(0.1, 0.0, Outcome(status="ok"))  # complete: it is not carried out again
    (row,) = json.loads(run_dir.result.read_text())["stages"]
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["seconds"] == pytest.approx(10.0 + 50.0 + 30.0)
    assert row["start_s"] == pytest.approx(2.0 + 10.0 + 5.0)


def test_a_stage_whose_checkpoints_were_removed_is_trained_again_and_has_the_new_numbers(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = run_dir.stage("student")

    def session_with(top1_pct: float) -> None:
        def train(assignment: Assignment) -> Outcome:
            if (complete := finished(assignment)) is None:
                for path in (stage.best, stage.last):
                    write_atomic(path, b"")
                names = [stage.best.name, stage.last.name]
                ended = numbers("summary", "student", 9, top1_pct=top1_pct) | {"precision": "fp32", "precision_reason": ""}
                assignment.log.record([event("checkpoint", "student", step=9, names=names), ended])
                complete = finished(assignment)
            assert complete is not None
            return complete

        monkeypatch.setattr(run_stages, "run_to_end", train)
        with open_session(RESOLVED, run_dir, end_of_run) as session:
            session.log._recorder = LocalRecorder(run_dir.root, session.log._file)
            run_stage(session, assignment_of(session, "student"))

    def recorded() -> list[float]:
        (row,) = json.loads(run_dir.result.read_text())["stages"]
        (summary,) = events_of(stage.root, "summary")
        return [row["metrics"]["top1_pct"], summary["metrics"]["top1_pct"], result_of(run_dir).stages[0].metrics["top1_pct"]]

    session_with(50.0)
    stage.last.unlink()  # as `distill clean --checkpoints-only` does of a complete stage, which stays complete
    session_with(60.0)
    assert recorded() == [50.0] * 3
    shutil.rmtree(stage.root)
    session_with(70.0)
    assert recorded() == [70.0] * 3
    assert len(events_of(stage.root, "stage_begun")) == 1


@pytest.mark.parametrize(("assistants", "model"), [([], "convnet_large"), ([{"model": "mlp_small"}], "mlp_small")])
def test_a_timing_run_trains_no_teacher_and_times_an_untrained_one(
    run_dir: RunDir, assistants: list[dict[str, str]], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = RESOLVED.override({"train.max_steps": 20, "assistants": assistants, "teacher.model": "convnet_large"}, "test")
    with open_session(timed, run_dir, end_of_run) as session:
        weights = prepare_teacher(session, Plan.on(timed.experiment, local_capacity()))
    assert weights is not None
    load_teacher(model, weights, image_size=8, classes=[str(digit) for digit in range(10)], seed=0)
    assert not session.result.stages
    assert f"timing run: the teacher {model} runs with untrained weights" in capsys.readouterr().out
