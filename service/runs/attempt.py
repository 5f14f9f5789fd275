"""A stage and its attempts: one `TorchTrainer.fit` each, and what the log says of it by now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.stages.assignment import Assignment
from service.runs.stored.stored_runs import begin_attempt, checkpoint, is_there
from trainables.rundir import StageDir
from trainables.stage_result import StageResult

if TYPE_CHECKING:
    from trainables.worker.trainer import ReusableWorkers


def fit_stage(assignment: Assignment, callbacks: list[Any] | None, reused: ReusableWorkers | None) -> None:
    """One `TorchTrainer.fit` of the stage, under a name of its own; what a kill has left of an earlier one is removed.

    Raises:
        DistillError, WorkersFailedError, ClusterFullError: see `trainables.worker.trainer.fit`.
        StorageError: the object store that has the run does not answer.
    """
    from trainables.worker import trainer

    stage = assignment.stage_dir
    config, recorder = begin_attempt(assignment.config, assignment.log)
    stage.root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(stage)
    trainer.fit(
        config,
        use_gpu=assignment.use_gpu,
        loader_workers=assignment.loader_workers,
        storage=assignment.storage,
        name=f"{config.labels.get('trial', config.stage)}-{time.time_ns():x}",
        recorder=recorder,
        callbacks=callbacks,
        reused=reused,
        limit_s=assignment.limit_s,
    )


def remove_leftovers(stage: StageDir) -> None:
    """Remove what a kill has left of checkpoints that it cut short."""
    for leftover in stage.last.parent.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def finished(assignment: Assignment, *, has_just_run: bool = False) -> Outcome | None:
    """The outcome of a complete stage, or None. One whose best checkpoint was removed since is none, unless it `has_just_run`."""
    events = assignment.events
    summary = next((event for event in reversed(events) if event["kind"] == "summary"), None)
    if summary is None:
        return None
    best = checkpoint(assignment.stage_dir, events)
    if best is not None and not has_just_run and not is_there(best, assignment.config.run_store):
        return None
    return complete(StageResult.model_validate(summary))


def complete(summary: StageResult) -> Outcome:
    """The outcome of a complete stage."""
    names = ("metrics", "precision", "precision_reason", "steps_s", "teachers")
    return Outcome(status="ok", **{name: getattr(summary, name) for name in names})


def is_lost(assignment: Assignment) -> bool:
    """Whether a stage has to begin from nothing again: the checkpoint from which it would go on was removed."""
    last = checkpoint(assignment.stage_dir, assignment.events, "last")
    return last is not None and finished(assignment) is None and not is_there(last, assignment.config.run_store)


def begin_stage(trial: str, assignment: Assignment) -> None:
    """Record that a trial's stage begins. Of one that begins from nothing again, what was recorded does not count any more."""
    discarded = [event("discarded", assignment.name)] if is_lost(assignment) else []
    assignment.log.record([*discarded, event("stage_begun", assignment.name, trial=trial, model=assignment.config.model)])
