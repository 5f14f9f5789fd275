"""What Ray Tune runs, each in a process of its own: a trial, or a group of workers that measures several."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ray
from ray import tune

from service.runs.attempt import begin_stage
from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.run_log import as_json
from service.runs.stages.assignment import Assignment
from service.runs.stages.stage_times import accounted_over_sessions
from service.runs.trial import refused_with, run_to_end
from trainables.process_exit import skip_exit_handlers
from trainables.worker.epoch_reports import EpochCallback, EpochReports
from trainables.worker.ray_nodes import on_this_node
from trainables.worker.trainer import ReusableWorkers

ENDED = "ended"
"""In the last report of a trial whose function ended; it is not in that of one that a scheduler has stopped."""


def run_trial(settings: dict[str, Any], assignments: dict[str, Assignment]) -> None:
    """The function that Ray Tune calls for a trial of its own: carry it out, record how it ended, and report to Tune.

    A trial that has ended already is not run again.
    """
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
    stages = [each.name for each in (assignment, assignment.init) if each is not None]
    return any(assignment.log.of(key) for key in (f"trials/{trial}", *stages))


def run_accounted(trial: str, assignment: Assignment, run: Callable[[Assignment], Outcome] = run_to_end) -> Outcome:
    """`run` a trial's stage, with the times of all sessions that worked on it."""
    begin_stage(trial, assignment)
    return accounted_over_sessions(run(assignment), assignment.events)


def judged(outcome: Outcome, target_pct: float | None) -> Outcome:
    """A training that ended without the accuracy that it was to reach is no complete one."""
    if target_pct is None or outcome.status != "ok" or "time_to_accuracy_s" in outcome.metrics:
        return outcome
    m = outcome.metrics
    reason = f"top-1 {m['top1_pct']:.2f}% after {m['train_s']:.1f} s, not {target_pct:g}%"
    return outcome.model_copy(update={"status": "stopped", "reason": reason})


def run_with_epochs(assignment: Assignment) -> Outcome:
    """See `run_to_end`; Ray Tune has each epoch's metrics, and the training waits until Tune has not ended the trial there."""
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
    skip_exit_handlers()
    workers = ReusableWorkers(coordinator, settings["group"], stops_early)
    outcome = run_to_end(ray.get(coordinator.start.remote(workers.group_id)), reused=workers)
    ray.get(coordinator.finish.remote(workers.group_id, outcome))
    tune.report({"done": True})
