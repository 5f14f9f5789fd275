"""The stages of a run: each is run once, shown, and recorded with the times of all sessions that worked on it."""

import os
from dataclasses import asdict
from pathlib import Path

from service.config.rules import needs_teacher
from service.runs.attempt import is_lost
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.run_log import as_json
from service.runs.session import Session, start_tracking
from service.runs.stages.assignment import Assignment
from service.runs.stages.stage_times import accounted_over_sessions
from service.runs.stored.stored_runs import checkpoint, display_name, put
from service.runs.trial import run_to_end
from trainables.errors import TrainingError
from trainables.rundir import StageDir


def prepare_teacher(session: Session, plan: Plan) -> str | None:
    """The path of the weights that the student learns from: the teacher's, or those of the last assistant.

    The teacher is trained, or gets its class means, unless it teaches with the weights that the experiment names, then each
    assistant by the one before it. A stage that is complete is not run again. A timing run trains none, see
    `untrained_teacher`. None: there is no teacher, or no method that needs one.

    Raises TrainingError: a training failed.
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
    """That of a stage that was run; None: it has none."""
    return checkpoint(stage, session.log.of(str(stage.root.relative_to(session.run_dir.root))))


def untrained_teacher(session: Session) -> str | None:
    """The student's teacher where steps are timed: its speed does not depend on its weights, so that its first ones will do.

    Raises:
        DistillError: the data or the model cannot be opened.
    """
    experiment, stage = session.experiment, session.run_dir.stage("untrained-teacher")
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
    seen = student_input(data) if assistants or teacher is None else teacher_input(teacher, data)
    model = build_model(name, num_classes=len(classes), image_size=seen.image_size, seed=experiment.seed)
    about = {"model": name, "num_classes": len(classes), "classes": list(classes), **asdict(seen)}
    write_tensors(stage.best, {f"model.{name}": value for name, value in model.state_dict().items()}, about)
    put(stage.best)
    session.display.print(f"steps are timed: the teacher {name} runs with untrained weights")
    return str(stage.best)


def run_stage(session: Session, assignment: Assignment) -> StageDir:
    """Carry a stage out, its init stage before it, shown and recorded. Raises TrainingError: one did not end well."""
    if assignment.init is not None:
        run_stage(session, assignment.init)
    assignment = assignment.recorded_by(session.log.recorder)
    config, stage, name = assignment.config, assignment.stage_dir, assignment.name
    if is_lost(assignment):
        session.record("discarded", name)
    session.record("stage_begun", name, model=config.model)
    session.display.follow(config.stage, name, stage, assignment.events)

    def tick() -> None:
        if os.path.exists(stage.heartbeats):  # also says no where a file server is down
            start_tracking(session)

    outcome = session.wait_for(lambda: run_to_end(assignment), tick)
    session.display.unfollow(name)
    record_stage(session, assignment, accounted_over_sessions(outcome, assignment.events))
    if outcome.status != "ok":
        raise TrainingError(outcome.reason)
    return stage


def record_stage(session: Session, assignment: Assignment, outcome: Outcome) -> None:
    """Record a stage's end, in place of an earlier try's."""
    best = checkpoint(assignment.stage_dir, assignment.events)
    about = {"model": assignment.config.model, "checkpoint": None if best is None else display_name(best)}
    session.record("stage_ended", assignment.name, outcome=as_json(outcome), **about)
    session.write_snapshot()
