"""The attempts at a stage, one `TorchTrainer.fit` each, and a stage's state according to the log."""

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
    """Run one `TorchTrainer.fit` of the stage under a unique name, after removing an earlier attempt's leftovers.

    Raises:
        DistillError, WorkersFailedError, ClusterFullError: see `trainables.worker.trainer.fit`.
        StorageError: the run's object store does not answer.
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
    """Remove partial checkpoints, which a killed attempt leaves behind."""
    for leftover in stage.last.parent.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def finished(assignment: Assignment, *, has_just_run: bool = False) -> Outcome | None:
    """Return the outcome of a complete stage, else None.

    A stage whose best checkpoint has been removed counts as incomplete, unless it `has_just_run`.
    """
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
    """Whether a stage must start over because the checkpoint to resume from was removed."""
    last = checkpoint(assignment.stage_dir, assignment.events, "last")
    return last is not None and finished(assignment) is None and not is_there(last, assignment.config.run_store)


def begin_stage(trial: str, assignment: Assignment) -> None:
    """Record that a trial's stage begins. If it starts over, its earlier events are discarded."""
    discarded = [event("discarded", assignment.name)] if is_lost(assignment) else []
    assignment.log.record([*discarded, event("stage_begun", assignment.name, trial=trial, model=assignment.config.model)])
