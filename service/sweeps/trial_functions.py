"""The functions that Ray Tune runs, each in its own process: a trial, or a worker group that measures several points."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ray
from ray import tune

from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.run_log import as_json
from service.runs.stages.assignment import Assignment
from service.runs.stages.stage_times import with_session_times
from service.runs.trial import begin_stage, refused_with, run_to_end
from trainables.process_exit import skip_exit_handlers
from trainables.worker.epoch_reports import EpochCallback, EpochReports
from trainables.worker.ray_nodes import on_this_node
from trainables.worker.trainer import ReusableWorkers

ENDED = "ended"
"""Key in a trial's last report that says that its function returned; it is missing if a scheduler stopped the trial."""


def run_trial(settings: dict[str, Any], assignments: dict[str, Assignment]) -> None:
    """Ray Tune's function for a trial with its own workers: run it, record its outcome, and report to Tune.

    A trial that has ended already is not run again.
    """
    skip_exit_handlers()
    trial_id = settings["trial"]
    assignment, outcome = assignments[trial_id], None
    if not assignment.log.of(f"trials/{trial_id}"):
        if assignment.init is not None:
            outcome = run_timed(trial_id, assignment.init)
            assignment = assignment.after(outcome.metrics.get("wall_s", 0.0))
        if outcome is None or outcome.status == "ok":
            teachers = outcome.teachers if outcome else []
            outcome = run_timed(trial_id, assignment, run_with_epochs if assignment.config.report_each_epoch else run_to_end)
            outcome = outcome.model_copy(update={"teachers": outcome.teachers or teachers})
        outcome, waiting = check_target(outcome, assignment.config.train.until_top1_pct), dict[str, Assignment]()
        if outcome.failure == "unschedulable":
            waiting = {other: each for other, each in assignments.items() if not has_begun(other, each)}
        refused = refused_with(trial_id, outcome, assignment, waiting).items()
        ended = [event("trial_ended", trial=id, outcome=as_json(each), refused_with=trial_id) for id, each in refused]
        assignment.log.record([event("trial_ended", trial=trial_id, outcome=as_json(outcome)), *ended])
    # The trial's row has the metrics: reporting them as well would take 2 kB each of the driver's memory during the sweep.
    tune.report({"done": True, ENDED: True})


def has_begun(trial: str, assignment: Assignment) -> bool:
    """Whether a trial has begun, or was refused before it could."""
    stages = [each.name for each in (assignment, assignment.init) if each is not None]
    return any(assignment.log.of(key) for key in (f"trials/{trial}", *stages))


def run_timed(trial: str, assignment: Assignment, run: Callable[[Assignment], Outcome] = run_to_end) -> Outcome:
    """`run` a trial's stage. The outcome has the times over all sessions."""
    begin_stage(trial, assignment)
    return with_session_times(run(assignment), assignment.events)


def check_target(outcome: Outcome, target_pct: float | None) -> Outcome:
    """Turn a complete training that missed its target accuracy into a `stopped` one."""
    if target_pct is None or outcome.status != "ok" or "time_to_accuracy_s" in outcome.metrics:
        return outcome
    m = outcome.metrics
    reason = f"top-1 {m['top1_pct']:.2f}% after {m['train_s']:.1f} s, not {target_pct:g}%"
    return outcome.model_copy(update={"status": "stopped", "reason": reason})


def run_with_epochs(assignment: Assignment) -> Outcome:
    """Like `run_to_end`, but report each epoch to Ray Tune; training waits until Tune lets the trial continue."""
    name = "-".join((*assignment.config.labels.values(), "epochs"))
    reports = ray.remote(EpochReports).options(name=name, num_cpus=0, scheduling_strategy=on_this_node()).remote()

    def report() -> None:
        while (epoch := ray.get(reports.get.remote())) is not None:
            try:
                tune.report(epoch)  # if Tune stops the trial, this ends the thread, and then the process ends
            except Exception as error:
                ray.get(reports.decided.remote(f"Ray Tune rejected an epoch's report: {error}"))
                raise
            ray.get(reports.decided.remote())
        ray.get(reports.decided.remote())

    threading.Thread(target=report, daemon=True).start()
    outcome = run_to_end(assignment, [EpochCallback(reports)])
    ray.get(reports.put.remote(None))
    return outcome


def run_worker_group(settings: dict[str, Any], coordinator: Any, *, stops_early: bool) -> None:
    """Ray Tune's function for a worker group: start workers once and measure points while the coordinator has any.

    `coordinator` is the sweep's `service.search.coordinator.PointCoordinator` actor, which also records the outcomes.
    """
    skip_exit_handlers()
    workers = ReusableWorkers(coordinator, settings["group"], stops_early)
    outcome = run_to_end(ray.get(coordinator.start.remote(workers.group_id)), reused=workers)
    ray.get(coordinator.finish.remote(workers.group_id, outcome))
    tune.report({"done": True})
