"""One trial = one `TorchTrainer.fit`, restarted after a death, with an outcome that never is a stack trace."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.run_log import as_json
from service.runs.stages.assignment import Assignment
from service.runs.stages.elastic import with_free_workers
from service.runs.stages.node_wait import NodeWait
from service.runs.stages.stage_times import accounted_over_sessions
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

log = logging.getLogger("raydistill")
ENDED = "ended"
"""In the last report of a trial whose function ended; it is not in that of one that a scheduler has stopped."""


def run_to_end(assignment: Assignment, callbacks: list[Any] | None = None, reused: ReusableWorkers | None = None) -> Outcome:
    """Train a stage to its end, from its last checkpoint where there is one.

    With `reused` the same workers go on to what their coordinator has next; the outcome is that of the stage which they were at.

    A worker or node that dies is no reason to stop: the stage is restarted up to `scale.max_failures` times, and as often as
    a node's end is announced. What the training itself refuses (a loss that is not finite, unreadable data), an error in a
    model's code and memory that runs out come back the same way every time, and end it at once; so does a second hang at the
    same position. Workers for which other jobs leave no resources wait; those that would not even fit on the empty cluster wait
    as long as `scale.wait_for_nodes_s` says.
    """
    restarts, used_s, node_wait = 0, 0.0, NodeWait()
    hung_in: list[str] = []
    while True:
        if outcome := finished(assignment, restarts):
            return outcome
        began_s = time.monotonic()
        result = attempt(with_free_workers(assignment).after(used_s), callbacks, reused, node_wait)
        if isinstance(result, Outcome):
            return result.model_copy(update={"restarts": restarts})
        if isinstance(result, WorkersFailedError):
            node_wait = NodeWait()  # there were workers: an earlier wait is over
            current = current_assignment(reused) if reused is not None else assignment
            if current is None:  # its last point was measured; the workers died on their way out
                return Outcome(status="failed", reason="the workers died when they had nothing left to do")
            if current != assignment:
                assignment, restarts, hung_in = current, 0, []
            cause = cause_of(result)
            try:
                if cause.kind == "hang":
                    record_hang(assignment, cause, result.stacks)
                if outcome := unless_restarted(assignment, cause, restarts, hung_in, node_wait):
                    return outcome
                counted = restarts + (cause.kind not in ANNOUNCED)
                assignment.log.record([event("restart", assignment.name, failure=asdict(cause), restarts=counted)])
            except OSError as error:  # as of a full disk, which workers that begin again would find full too
                unwritten = failure_of(error, None)
                return Outcome(status="failed", reason=f"{cause}; then {unwritten}", failure=unwritten.kind, restarts=restarts)
            restarts = counted
            used_s = used_s + time.monotonic() - began_s if reused is None else record_restart(reused, restarts)


def attempt(
    assignment: Assignment, callbacks: list[Any] | None, reused: ReusableWorkers | None, node_wait: NodeWait
) -> Outcome | WorkersFailedError | None:
    """Train a stage once: its outcome, or why its workers failed; None where they found no room and may now.

    Raises WorkersFailedError: the driver is ending, so that nobody waits for this trial any more.
    """
    import ray

    from trainables.worker import trainer

    try:
        fit_stage(assignment, callbacks, reused)
    except trainer.ClusterFullError:
        if refusal := refusal_after_wait(node_wait, assignment):
            return Outcome(status="failed", reason=refusal, failure="unschedulable")
        if not node_wait.is_waiting:
            assignment.append_to_log("the cluster has no room for the workers yet: still waiting")
        return None
    except DistillError as error:
        return Outcome(status="failed", reason=str(error), failure=kind_of(error))
    except WorkersFailedError as error:
        if not ray.is_initialized():
            raise
        return error
    return finished(assignment, has_just_run=True) or Outcome(status="failed", reason="the stage ended without a result")


def current_assignment(reused: ReusableWorkers) -> Assignment | None:
    """The stage that reused workers are at; None where they have measured their last."""
    import ray

    current: Assignment | None = ray.get(reused.coordinator.current.remote(reused.group_id))
    return current


def record_restart(reused: ReusableWorkers, restarts: int) -> float:
    """Note that other workers start for the stage that reused workers were at; returns the seconds that it has taken."""
    import ray

    used_s: float = ray.get(reused.coordinator.restart.remote(reused.group_id, restarts))
    return used_s


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


def unless_restarted(
    assignment: Assignment, cause: Failure, restarts: int, hung_in: list[str], node_wait: NodeWait
) -> Outcome | None:
    """The outcome of a stage whose workers failed; None where it is to be restarted, once there are resources for it.

    `hung_in`: where it hung before, to which this adds.
    """
    limit, announced = assignment.config.scale.max_failures, cause.kind in ANNOUNCED
    outcome = Outcome(
        status="oom" if cause.kind in OUT_OF_MEMORY_KINDS else "failed", reason=str(cause), failure=cause.kind, restarts=restarts
    )
    if cause.kind == "hang":
        stacks = display_name(assignment.stage_dir.stacks)
        assignment.append_to_log(f"{cause} (the stacks of all threads are in {stacks})")
        if cause.position is not None:
            if cause.position in hung_in:
                return outcome.model_copy(update={"reason": f"hung in {cause.position} again: {cause}"})
            hung_in.append(cause.position)
    if cause.kind not in RETRYABLE or (restarts == limit and not announced):
        return outcome
    counted = "" if announced else f" (restart {restarts + 1} of at most {limit})"
    why = "hang" if cause.kind == "hang" else cause  # a hang is in the log already
    assignment.append_to_log(f"{why}: going on from the last checkpoint{counted}")
    if refusal := refusal_after_wait(node_wait, assignment):
        return outcome.model_copy(update={"reason": f"{cause}; and now {refusal}"})
    return None


def refusal_after_wait(node_wait: NodeWait, assignment: Assignment) -> str | None:
    """See `NodeWait.refusal`."""
    limit_s = assignment.config.scale.wait_for_nodes_s
    return node_wait.refusal(assignment.reservation, limit_s, assignment.append_to_log)


def finished(assignment: Assignment, restarts: int = 0, *, has_just_run: bool = False) -> Outcome | None:
    """The outcome of a complete stage, or None. One whose best checkpoint was removed since is none, unless it `has_just_run`."""
    events = assignment.events
    summary = next((event for event in reversed(events) if event["kind"] == "summary"), None)
    if summary is None:
        return None
    best = checkpoint(assignment.stage_dir, events)
    if best is not None and not has_just_run and not is_there(best, assignment.config.run_store):
        return None
    return complete(StageResult.model_validate(summary), restarts)


def begin_stage(trial: str, assignment: Assignment) -> None:
    """Record that a trial's stage begins. Of one that begins from nothing again, what was recorded does not count any more."""
    discarded = [event("discarded", assignment.name)] if is_lost(assignment) else []
    assignment.log.record([*discarded, event("stage_begun", assignment.name, trial=trial, model=assignment.config.model)])


def is_lost(assignment: Assignment) -> bool:
    """Whether a stage has to begin from nothing again: the checkpoint from which it would go on was removed."""
    last = checkpoint(assignment.stage_dir, assignment.events, "last")
    return last is not None and finished(assignment) is None and not is_there(last, assignment.config.run_store)


def complete(summary: StageResult, restarts: int = 0) -> Outcome:
    """The outcome of a complete stage."""
    return Outcome(
        status="ok",
        metrics=summary.metrics,
        precision=summary.precision,
        precision_reason=summary.precision_reason,
        restarts=restarts,
        steps_s=summary.steps_s,
        teachers=summary.teachers,
    )


def cause_of(error: WorkersFailedError) -> Failure:
    """What the watch over the workers found, or else the first cause of what ended them."""
    ended = [failure for failure in error.failures if failure.kind in ("hang", "time_limit")]
    return first_cause(ended or error.failures)


def record_hang(assignment: Assignment, cause: Failure, stacks: str) -> None:
    """Record a hang, and what all threads were doing in `logs/hangs.txt`."""
    assignment.log.record([event("hang", assignment.name, message=redact(str(cause)))])
    assignment.log.text(assignment.stage_dir.stacks, f"{datetime.now():%Y-%m-%d %H:%M:%S} {redact(stacks)}\n\n")


def run_trial(settings: dict[str, Any], assignments: dict[str, Assignment]) -> None:
    """The function that Ray Tune calls for a trial of its own: carry it out, record how it ended, and report to Tune.

    A trial that has ended already is not run again.
    """
    from ray import tune

    from trainables.process_exit import skip_exit_handlers

    skip_exit_handlers()
    trial_id = settings["trial"]
    assignment, outcome = assignments[trial_id], None
    if not assignment.log.of(f"trials/{trial_id}"):
        if assignment.init is not None:
            outcome = run_accounted(trial_id, assignment.init)
            assignment = assignment.after(outcome.metrics.get("wall_s", 0.0))
        if outcome is None or outcome.status == "ok":
            teachers = outcome.teachers if outcome else []
            outcome = run_accounted(trial_id, assignment, run_with_epochs if assignment.config.report_each_epoch else run_to_end)
            outcome = outcome.model_copy(update={"teachers": outcome.teachers or teachers})
        outcome, waiting = judged(outcome, assignment.config.train.until_top1_pct), dict[str, Assignment]()
        if outcome.failure == "unschedulable":
            waiting = {other: each for other, each in assignments.items() if not has_begun(other, each)}
        refused = refused_with(trial_id, outcome, assignment, waiting).items()
        ended = [event("trial_ended", trial=id, outcome=as_json(each), refused_with=trial_id) for id, each in refused]
        assignment.log.record([event("trial_ended", trial=trial_id, outcome=as_json(outcome)), *ended])
    # No metrics, which are in the trial's row: each takes 2 kB of the driver's memory for as long as the sweep runs.
    tune.report({"done": True, ENDED: True})


def has_begun(trial: str, assignment: Assignment) -> bool:
    """Whether a trial has begun, or has ended without."""
    stages = [assignment.name, *([assignment.init.name] if assignment.init is not None else [])]
    return any(assignment.log.of(key) for key in (f"trials/{trial}", *stages))


def refused_with(trial: str, outcome: Outcome, assignment: Assignment, waiting: Mapping[str, Assignment]) -> dict[str, Outcome]:
    """The outcomes of trials that need as much as one that has waited for nodes in vain: one such wait is enough."""
    if outcome.failure != "unschedulable":
        return {}
    reason = f"it needs as much as trial {trial}, and {outcome.reason}"
    refusal = Outcome(status="failed", failure="unschedulable", reason=reason)
    return {other: refusal for other, each in waiting.items() if each.reservation.is_as_large_as(assignment.reservation)}


def run_accounted(trial: str, assignment: Assignment, run: Callable[[Assignment], Outcome] = run_to_end) -> Outcome:
    """`run` a trial's stage, with the times of all sessions that worked on it."""
    begin_stage(trial, assignment)
    outcome = accounted_over_sessions(run(assignment), assignment.events)
    shown = {"status": outcome.status, "reason": outcome.reason}  # the rest is in the trial's end
    assignment.log.record([event("stage_ended", assignment.name, trial=trial, outcome=shown)])
    return outcome


def judged(outcome: Outcome, target_pct: float | None) -> Outcome:
    """A training that ended without the accuracy that it was to reach is no complete one."""
    if target_pct is None or outcome.status != "ok" or "time_to_accuracy_s" in outcome.metrics:
        return outcome
    m = outcome.metrics
    reason = f"top-1 {m['top1_pct']:.2f}% after {m['train_s']:.1f} s, not {target_pct:g}%"
    return outcome.model_copy(update={"status": "stopped", "reason": reason})


def run_with_epochs(assignment: Assignment) -> Outcome:
    """See `run_to_end`; Ray Tune has each epoch's metrics, and the training waits until Tune has not ended the trial there."""
    import ray
    from ray import tune

    from trainables.worker.epoch_reports import EpochCallback, EpochReports
    from trainables.worker.ray_nodes import on_this_node

    name = "-".join((*assignment.config.labels.values(), "epochs"))
    reports = ray.remote(EpochReports).options(name=name, num_cpus=0, scheduling_strategy=on_this_node()).remote()

    def report() -> None:
        while (epoch := ray.get(reports.get.remote())) is not None:
            try:
                tune.report(epoch)  # ends this thread where Tune ends the trial, whose process ends then too
            except Exception as error:
                ray.get(reports.decided.remote(f"Ray Tune did not take an epoch: {error}"))
                raise
            ray.get(reports.decided.remote())
        ray.get(reports.decided.remote())

    threading.Thread(target=report, daemon=True).start()
    outcome = run_to_end(assignment, [EpochCallback(reports)])
    ray.get(reports.put.remote(None))
    return outcome


def run_worker_group(settings: dict[str, Any], coordinator: Any, *, stops_early: bool) -> None:
    """Ray Tune's function of a worker group: one start of workers, as many points as the coordinator has for them.

    `coordinator` is the sweep's actor, a `service.search.coordinator.PointCoordinator`; it also writes the points' results.
    """
    import ray
    from ray import tune

    from trainables.process_exit import skip_exit_handlers
    from trainables.worker.trainer import ReusableWorkers

    skip_exit_handlers()
    workers = ReusableWorkers(coordinator, settings["group"], stops_early)
    outcome = run_to_end(ray.get(coordinator.start.remote(workers.group_id)), reused=workers)
    ray.get(coordinator.finish.remote(workers.group_id, outcome))
    tune.report({"done": True})
