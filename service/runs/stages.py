"""The stages of a run: each is carried out once, shown, and recorded with the times of all sessions that worked on it."""

from __future__ import annotations

import time
from pathlib import Path

from service.config.method_rules import needs_teacher
from service.runs.assignment import Assignment
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.result import StageRow, StageTimes
from service.runs.session import Session, record_numbers, start_tracking
from service.runs.trial import accounted, run_to_end
from trainables.config import TrainConfig
from trainables.errors import TrainingError
from trainables.rundir import StageDir


def prepare_teacher(session: Session, plan: Plan) -> str | None:
    """The path of the weights that the student learns from: the teacher's, or those of the last assistant.

    The teacher is trained unless the experiment names its weights, then each assistant by the one before it. A stage that is
    complete is not carried out again. None: there is no teacher, or no method that needs one.

    Raises:
        TrainingError: a training failed.
    """
    experiment = plan.experiment
    if experiment.teacher is None or not needs_teacher(experiment.distill, experiment.sweep.axes):
        return None
    weights = experiment.teacher.weights
    for name in experiment.preparation:
        if name == "teacher" and weights is not None:
            continue
        assignment = plan.assign(name, session.run_dir, {"run": session.run_dir.root.name}, weights)
        weights = str(StageDir(Path(run_stage(session, assignment).output_dir)).best)
    return weights


def run_stage(session: Session, assignment: Assignment) -> TrainConfig:
    """Carry a stage out, shown and recorded.

    Raises:
        TrainingError: it did not end well; one line.
    """
    config, stage = assignment.config, assignment.stage_dir
    if session.tracker:
        session.tracker.follow(session.key, stage.metrics, f"{config.stage}/")
    session.display.follow(config.stage, stage)
    began_s = time.time()

    def tick() -> None:
        if stage.metrics.exists():
            start_tracking(session)

    try:
        outcome = session.wait_for(lambda: run_to_end(assignment), tick)
    except BaseException:  # the session ends, and is saved: so is what it has done of this stage
        over_sessions(session, config.stage, accounted(Outcome(status="stopped"), stage, began_s))
        raise
    session.display.unfollow(config.stage)
    record_stage(session, assignment, accounted(outcome, stage, began_s))
    if config.stage != "student":  # which has plain names, see `record_student`
        record_numbers(session, session.key, stage, outcome.metrics, f"{config.stage}/")
    if outcome.status != "ok":
        raise TrainingError(outcome.reason)
    return config


def record_stage(session: Session, assignment: Assignment, outcome: Outcome) -> None:
    """Add a stage's end to `result.json`, in place of an earlier try's."""
    config, stage = assignment.config, assignment.stage_dir
    rows = {row.stage: row for row in session.result.stages}
    before = rows.pop(config.stage, None)
    if before and before.status == outcome.status == "ok":  # it was complete: its times stand
        return
    outcome = over_sessions(session, config.stage, outcome)
    row = StageRow(
        stage=config.stage,
        model=config.model,
        status=outcome.status,
        reason=outcome.reason,
        failure=outcome.failure,
        restarts=outcome.restarts,
        metrics=outcome.metrics,
        checkpoint=str(stage.best) if stage.best.exists() else None,
        seconds=outcome.seconds,
        start_s=outcome.start_s,
        end_s=outcome.end_s,
    )
    session.save(stages=[*rows.values(), row])


def over_sessions(session: Session, stage: str, outcome: Outcome) -> Outcome:
    """The outcome with the times of this session and of the earlier ones that carried out the stage; saved for the next one."""
    before = session.result.stage_times.get(stage, StageTimes(seconds=0.0, start_s=None))
    starts_s = [start_s for start_s in (before.start_s, outcome.start_s) if start_s is not None]
    times = StageTimes(seconds=before.seconds + outcome.seconds, start_s=sum(starts_s) if starts_s else None)
    session.save(stage_times={**session.result.stage_times, stage: times})
    return outcome.model_copy(update=dict(times))
