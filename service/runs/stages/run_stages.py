"""Runs the stages of a run, each once, and shows and records them."""

import os
from dataclasses import asdict
from pathlib import Path

from service.config.rules import needs_teacher
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.run_log import as_json
from service.runs.session import Session, start_tracking
from service.runs.stages.assignment import Assignment
from service.runs.stages.stage_times import with_session_times
from service.runs.stored.stored_runs import checkpoint, display_name, upload
from service.runs.trial import is_lost, run_to_end
from trainables.errors import TrainingError
from trainables.rundir import StageDir

UNTRAINED_TEACHER = "untrained-teacher"
"""The folder of a timing run's teacher, where it has no weights."""


def prepare_teacher(session: Session, plan: Plan) -> str | None:
    """Train the teacher and then each assistant, and return the path of the weights that the student learns from.

    The teacher is not trained if the experiment's weights are used as they are; with `teacher.head` it only gets its class
    means. Complete stages are not run again. A timing run trains no teacher, see `untrained_teacher`. Returns None if there
    is no teacher, or no method that needs one.

    Raises TrainingError: a stage failed.
    """
    experiment = plan.experiment
    if experiment.train.max_steps is not None:
        return untrained_teacher(session)
    if not experiment.all_teachers or not needs_teacher(experiment.distill, experiment.sweep.axes):
        return None
    weights = experiment.teacher.weights if experiment.teacher is not None else None
    has_head = experiment.teacher is not None and experiment.teacher.head is not None
    for name in [*(["teacher"] if has_head else []), *experiment.trained_before]:
        assignment = plan.assign(name, session.run_dir, {"run": session.run_dir.root.name}, weights)
        stage = run_stage(session, assignment)
        weights = str(best_checkpoint(session, stage) or stage.best)
    return weights


def best_checkpoint(session: Session, stage: StageDir) -> Path | None:
    """Return the best checkpoint of a stage that has run, or None."""
    return checkpoint(stage, session.log.of(str(stage.root.relative_to(session.run_dir.root))))


def untrained_teacher(session: Session) -> str | None:
    """Return weights for the teacher of a timing run; untrained ones will do, as speed does not depend on them.

    Raises DistillError: the data or the model cannot be opened.
    """
    experiment, stage = session.experiment, session.run_dir.stage(UNTRAINED_TEACHER)
    teacher, data, assistants = experiment.teacher, experiment.data, experiment.assistants
    if teacher is not None and not teacher.needs_training and not teacher.head and not assistants:
        return teacher.weights
    if not (teacher or assistants) or not needs_teacher(experiment.distill, experiment.sweep.axes):
        return None
    name = [each.model for each in (teacher, *assistants) if each is not None][-1]
    from trainables.data.source import open_source
    from trainables.engine.checkpoint import write_tensors
    from trainables.models.model_input import student_input, teacher_input
    from trainables.models.registry import build_model

    classes = open_source(data, "train").classes
    model_input = student_input(data) if assistants or teacher is None else teacher_input(teacher, data)
    model = build_model(name, num_classes=len(classes), image_size=model_input.image_size, seed=experiment.seed)
    metadata = {"model": name, "num_classes": len(classes), "classes": list(classes), **asdict(model_input)}
    write_tensors(stage.best, {f"model.{name}": value for name, value in model.state_dict().items()}, metadata)
    upload(stage.best)
    session.display.print(f"timing run: the teacher {name} runs with untrained weights")
    return str(stage.best)


def run_stage(session: Session, assignment: Assignment) -> StageDir:
    """Run a stage after its init stage, showing and recording both. Raises TrainingError: one failed."""
    if assignment.init is not None:
        run_stage(session, assignment.init)
    assignment = assignment.recorded_by(session.log.recorder)
    config, stage, name = assignment.config, assignment.stage_dir, assignment.name
    if is_lost(assignment):
        session.record("discarded", name)
    session.record("stage_begun", name, model=config.model)
    session.display.follow(config.stage, name, stage, assignment.events)

    def tick() -> None:
        if os.path.exists(stage.heartbeats):  # False also if a file server is down
            start_tracking(session)

    outcome = session.wait_for(lambda: run_to_end(assignment), tick)
    session.display.unfollow(name)
    record_stage(session, assignment, with_session_times(outcome, assignment.events))
    if outcome.status != "ok":
        raise TrainingError(outcome.reason)
    return stage


def record_stage(session: Session, assignment: Assignment, outcome: Outcome) -> None:
    """Record a stage's end, which replaces that of an earlier try."""
    best = checkpoint(assignment.stage_dir, assignment.events)
    about = {"model": assignment.config.model, "checkpoint": None if best is None else display_name(best)}
    session.record("stage_ended", assignment.name, outcome=as_json(outcome), **about)
    session.write_snapshot()
