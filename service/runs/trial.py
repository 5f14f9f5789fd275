"""A stage trained to its end, and what follows from each failure of its workers: an outcome that never is a stack trace."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from service.runs.attempt import finished, fit_stage
from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.stages.assignment import Assignment
from service.runs.stages.elastic import with_free_workers
from service.runs.stages.node_wait import NodeWait
from service.runs.stored.stored_runs import display_name
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

if TYPE_CHECKING:
    from trainables.worker.trainer import ReusableWorkers


def run_to_end(assignment: Assignment, callbacks: list[Any] | None = None, reused: ReusableWorkers | None = None) -> Outcome:
    """Train a stage to its end, from its last checkpoint where there is one.

    With `reused` the same workers go on to what their coordinator has next; the outcome is that of the stage which they were at.

    A worker or node that dies is no reason to stop: the stage is restarted up to `scale.max_failures` times, and as often as
    a node's end is announced. What the training itself refuses (a loss that is not finite, unreadable data), an error in a
    model's code and memory that runs out come back the same way every time, and end it at once; so does a second hang at the
    same position. Workers for which other jobs leave no resources wait; those that would not even fit on the empty cluster wait
    as long as `scale.wait_for_nodes_s` says.
    """
    run, outcome = _Run(assignment, callbacks, reused), None
    while outcome is None:
        outcome = finished(run.assignment) or run.attempt()
    return outcome.model_copy(update={"restarts": run.restarts})


class _Run:
    """The attempts at a stage so far."""

    def __init__(self, assignment: Assignment, callbacks: list[Any] | None, reused: ReusableWorkers | None) -> None:
        self.assignment, self.restarts = assignment, 0
        self._callbacks, self._reused = callbacks, reused
        self._node_wait, self._used_s = NodeWait(), 0.0
        self._hung_in = set[str]()

    def attempt(self) -> Outcome | None:
        """Train it once: its outcome; None where it is to be tried again.

        Raises WorkersFailedError: the driver is ending, so that nobody waits for this trial any more.
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
                self.assignment.append_to_log("the cluster has no room for the workers yet: still waiting")
            return None
        except DistillError as error:
            return Outcome(status="failed", reason=str(error), failure=kind_of(error))
        except WorkersFailedError as error:
            if not ray.is_initialized():
                raise
            self._node_wait = NodeWait()  # there were workers: an earlier wait is over
            return self._after_failure(error, began_s)
        return finished(self.assignment, has_just_run=True) or Outcome(status="failed", reason="the stage ended without a result")

    def _refusal(self) -> str | None:
        """See `NodeWait.refusal`."""
        limit_s = self.assignment.config.scale.wait_for_nodes_s
        return self._node_wait.refusal(self.assignment.reservation, limit_s, self.assignment.append_to_log)

    def _after_failure(self, error: WorkersFailedError, began_s: float) -> Outcome | None:
        """The outcome of a stage whose workers failed; None where it is to be restarted, once there are resources for it."""
        import ray

        reused = self._reused
        if reused is not None:
            current = ray.get(reused.coordinator.current.remote(reused.group_id))
            if current is None:  # its last point was measured; the workers died on their way out
                return Outcome(status="failed", reason="the workers died when they had nothing left to do")
            if current != self.assignment:
                self.assignment, self.restarts, self._hung_in = current, 0, set()
        cause = cause_of(error)
        try:
            if outcome := self._end_of(cause, error.stacks):
                return outcome
            restarts = self.restarts + (cause.kind not in ANNOUNCED)
            self.assignment.log.record([event("restart", self.assignment.name, failure=asdict(cause), restarts=restarts)])
        except OSError as refused:  # as of a full disk, which workers that begin again would find full too
            unwritten = failure_of(refused, None)
            return Outcome(status="failed", reason=f"{cause}; then {unwritten}", failure=unwritten.kind)
        self.restarts = restarts
        if reused is None:
            self._used_s += time.monotonic() - began_s
        else:
            self._used_s = ray.get(reused.coordinator.restart.remote(reused.group_id, restarts))
        return None

    def _end_of(self, cause: Failure, stacks: str) -> Outcome | None:
        """How the stage ends with this failure; None: it is restarted."""
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
        why = "hang" if cause.kind == "hang" else cause  # a hang is in the log already
        self.assignment.append_to_log(f"{why}: going on from the last checkpoint{counted}")
        refusal = self._refusal()
        return outcome.model_copy(update={"reason": f"{cause}; and now {refusal}"}) if refusal else None

    def _record_hang(self, cause: Failure, stacks: str) -> None:
        """Record a hang, and what all threads were doing in `logs/hangs.txt`."""
        assignment, path = self.assignment, self.assignment.stage_dir.stacks
        assignment.log.record([event("hang", assignment.name, message=redact(str(cause)))])
        assignment.log.text(path, f"{datetime.now():%Y-%m-%d %H:%M:%S} {redact(stacks)}\n\n")
        assignment.append_to_log(f"{cause} (the stacks of all threads are in {display_name(path)})")


def cause_of(error: WorkersFailedError) -> Failure:
    """What the watch over the workers found, or else the first cause of what ended them."""
    ended = [failure for failure in error.failures if failure.kind in ("hang", "time_limit")]
    return first_cause(ended or error.failures)


def refused_with(trial: str, outcome: Outcome, assignment: Assignment, waiting: Mapping[str, Assignment]) -> dict[str, Outcome]:
    """The outcomes of trials that need as much as one that has waited for nodes in vain: one such wait is enough."""
    if outcome.failure != "unschedulable":
        return {}
    reason = f"it needs as much as trial {trial}, and {outcome.reason}"
    refusal = Outcome(status="failed", failure="unschedulable", reason=reason)
    return {other: refusal for other, each in waiting.items() if each.reservation.is_as_large_as(assignment.reservation)}
