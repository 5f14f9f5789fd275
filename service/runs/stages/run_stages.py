"""The stages of a run: each is carried out once, shown, and recorded with the times of all sessions that worked on it."""

import os
from pathlib import Path

from service.config.method_rules import needs_teacher
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.result import StageRow
from service.runs.session import Session, record_numbers, start_tracking
from service.runs.stages.assignment import Assignment
from service.runs.stages.hangs import hang_tags
from service.runs.stages.stage_times import accounted_over_sessions, stage_session
from service.runs.stored.stored_runs import display_name
from service.runs.trial import run_to_end
from trainables.config import TrainConfig
from trainables.errors import TrainingError
from trainables.rundir import StageDir


def prepare_teacher(session: Session, plan: Plan) -> str | None:
    """The path of the weights that the student learns from: the teacher's, or those of the last assistant.

    The teacher is trained unless the experiment names its weights, then each assistant by the one before it. A stage that is
    complete is not carried out again. None: there is no teacher, or no method that needs one.

    Raises TrainingError: a training failed.
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
    """Carry a stage out, shown and recorded. Raises TrainingError: it did not end well."""
    config, stage = assignment.config, assignment.stage_dir
    if session.tracker:
        session.tracker.follow(session.key, stage.metrics, f"{config.stage}/")
    session.display.follow(config.stage, stage)

    def tick() -> None:
        if os.path.exists(stage.metrics):  # also says no where a file server is down
            start_tracking(session)

    with stage_session(stage):
        outcome = accounted_over_sessions(session.wait_for(lambda: run_to_end(assignment), tick), stage)
    session.display.unfollow(config.stage)
    record_stage(session, assignment, outcome)
    if session.tracker and (tags := hang_tags(stage)):
        session.tracker.tags(session.key, tags)
    if config.stage != "student":  # which has plain names, see `record_student`
        record_numbers(session, session.key, stage, outcome.metrics, f"{config.stage}/")
    if outcome.status != "ok":
        raise TrainingError(outcome.reason)
    return config


def record_stage(session: Session, assignment: Assignment, outcome: Outcome) -> None:
    """Add a stage's end to `result.json`, in place of an earlier try's."""
    stage, best = assignment.config.stage, assignment.stage_dir.best
    rows = {row.stage: row for row in session.result.stages}
    before = rows.pop(stage, None)
    if before and before.status == outcome.status == "ok":  # it was complete: its times stand
        return
    fields = outcome.model_dump(exclude={"steps_s", "ended_s", "measurements"})
    about = {"stage": stage, "model": assignment.config.model, "checkpoint": display_name(best) if best.exists() else None}
    session.save(stages=[*rows.values(), StageRow.model_validate({**about, **fields})])
