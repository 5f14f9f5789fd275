"""Trains a stage to its end, restarting it after failures; the result is an outcome, never a stack trace.

Each attempt is one `TorchTrainer.fit`. The log says how far a stage is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.stages.assignment import Assignment
from service.runs.stages.elastic import with_free_workers
from service.runs.stages.node_wait import NodeWait
from service.runs.stored.stored_runs import begin_attempt, checkpoint, display_name, is_there
from trainables.errors import DistillError
from trainables.failures import (
    ANNOUNCED,
    OUT_OF_MEMORY_KINDS,
    RETRYABLE,
    Failure,
    WorkersFailedError,
    failure_of,
    first_cause,
    kind_of,
)
from trainables.redact import redact
from trainables.rundir import StageDir
from trainables.stage_result import StageResult

if TYPE_CHECKING:
    from trainables.worker.trainer import ReusableWorkers


def run_to_end(assignment: Assignment, callbacks: list[Any] | None = None, reused: ReusableWorkers | None = None) -> Outcome:
    """Train a stage to its end, from its last checkpoint if it has one.

    With `reused`, the workers continue with the next stage of their coordinator; the outcome is that of their last stage.

    If a worker or node dies, the stage is restarted up to `scale.max_failures` times; announced node shutdowns do not count.
    Failures that would repeat end it at once: a loss that is not finite, unreadable data, an error in a model's code,
    out of memory, and a second hang at the same position. If other jobs hold the resources, workers wait; if they would not
    even fit on the empty cluster, they wait for at most `scale.wait_for_nodes_s`.
    """
    run, outcome = _Run(assignment, callbacks, reused), None
    while outcome is None:
        outcome = finished(run.assignment) or run.attempt()
    return outcome.model_copy(update={"restarts": run.restarts})


class _Run:
    """State over the attempts at a stage."""

    def __init__(self, assignment: Assignment, callbacks: list[Any] | None, reused: ReusableWorkers | None) -> None:
        self.assignment, self.restarts = assignment, 0
        self._callbacks, self._reused = callbacks, reused
        self._node_wait, self._used_s = NodeWait(), 0.0
        self._hung_in = set[str]()

    def attempt(self) -> Outcome | None:
        """Run one attempt. Returns the outcome, or None if the stage should be tried again.

        Raises WorkersFailedError: the workers failed because the driver is shutting down.
        """
        import ray

        from trainables.worker import trainer

        began_s = time.monotonic()
        try:
            fit_stage(with_free_workers(self.assignment).after(self._used_s), self._callbacks, self._reused)
        except trainer.ClusterFullError:
            if refusal := self._refusal():
                return Outcome(status="failed", reason=refusal, failure="unschedulable")
            if not self._node_wait.is_waiting:
                self.assignment.append_to_log("the cluster has no room for the workers yet; still waiting")
            return None
        except DistillError as error:
            return Outcome(status="failed", reason=str(error), failure=kind_of(error))
        except WorkersFailedError as error:
            if not ray.is_initialized():
                raise
            self._node_wait = NodeWait()  # the workers started, so an earlier wait is over
            return self._after_failure(error, began_s)
        return finished(self.assignment, has_just_run=True) or Outcome(status="failed", reason="the stage ended without a result")

    def _refusal(self) -> str | None:
        """See `NodeWait.refusal`."""
        limit_s = self.assignment.config.scale.wait_for_nodes_s
        return self._node_wait.refusal(self.assignment.reservation, limit_s, self.assignment.append_to_log)

    def _after_failure(self, error: WorkersFailedError, began_s: float) -> Outcome | None:
        """Return the outcome after the workers failed, or None if the stage should be restarted."""
        import ray

        reused = self._reused
        if reused is not None:
            current = ray.get(reused.coordinator.current.remote(reused.group_id))
            if current is None:  # the workers died while shutting down, after their last point
                return Outcome(status="failed", reason="the workers died after their last point was measured")
            if current != self.assignment:
                self.assignment, self.restarts, self._hung_in = current, 0, set()
        cause = cause_of(error)
        try:
            if outcome := self._final_outcome(cause, error.stacks):
                return outcome
            restarts = self.restarts + (cause.kind not in ANNOUNCED)
            self.assignment.log.record([event("restart", self.assignment.name, failure=asdict(cause), restarts=restarts)])
        except OSError as error:  # such as a full disk, which restarted workers would run into as well
            write_failure = failure_of(error, None)
            return Outcome(status="failed", reason=f"{cause}; then {write_failure}", failure=write_failure.kind)
        self.restarts = restarts
        if reused is None:
            self._used_s += time.monotonic() - began_s
        else:
            self._used_s = ray.get(reused.coordinator.restart.remote(reused.group_id, restarts))
        return None

    def _final_outcome(self, cause: Failure, stacks: str) -> Outcome | None:
        """Return the outcome that this failure ends the stage with, or None if the stage should be restarted."""
        is_oom = cause.kind in OUT_OF_MEMORY_KINDS
        outcome = Outcome(status="oom" if is_oom else "failed", reason=str(cause), failure=cause.kind)
        if cause.kind == "hang":
            self._record_hang(cause, stacks)
            if cause.position in self._hung_in:
                return outcome.model_copy(update={"reason": f"hung in {cause.position} again: {cause}"})
            if cause.position is not None:
                self._hung_in.add(cause.position)
        limit, announced = self.assignment.config.scale.max_failures, cause.kind in ANNOUNCED
        if cause.kind not in RETRYABLE or (self.restarts == limit and not announced):
            return outcome
        counted = "" if announced else f" (restart {self.restarts + 1} of at most {limit})"
        why = "hang" if cause.kind == "hang" else cause  # its details are in the log already
        self.assignment.append_to_log(f"{why}: restarting from the last checkpoint{counted}")
        refusal = self._refusal()
        return outcome.model_copy(update={"reason": f"{cause}; then {refusal}"}) if refusal else None

    def _record_hang(self, cause: Failure, stacks: str) -> None:
        """Record a hang, and write the stacks of all threads to `logs/hangs.txt`."""
        assignment, path = self.assignment, self.assignment.stage_dir.stacks
        assignment.log.record([event("hang", assignment.name, message=redact(str(cause)))])
        assignment.log.text(path, f"{datetime.now():%Y-%m-%d %H:%M:%S} {redact(stacks)}\n\n")
        assignment.append_to_log(f"{cause} (the stacks of all threads are in {display_name(path)})")


def cause_of(error: WorkersFailedError) -> Failure:
    """Return the hang or time limit that ended the workers, or else the first cause of their failures."""
    ended = [failure for failure in error.failures if failure.kind in ("hang", "time_limit")]
    return first_cause(ended or error.failures)


def refused_with(trial: str, outcome: Outcome, assignment: Assignment, waiting: Mapping[str, Assignment]) -> dict[str, Outcome]:
    """Refuse the waiting trials that need as much as one that waited for nodes in vain, so that they do not wait as well."""
    if outcome.failure != "unschedulable":
        return {}
    reason = f"it needs as much as trial {trial}, and {outcome.reason}"
    refusal = Outcome(status="failed", failure="unschedulable", reason=reason)
    return {other: refusal for other, each in waiting.items() if each.reservation.is_as_large_as(assignment.reservation)}


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
