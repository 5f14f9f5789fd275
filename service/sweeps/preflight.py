"""What can be refused of a sweep before Ray starts; see `service.runs.preflight`."""

from __future__ import annotations

from collections.abc import Sequence

from service.cluster.resources import is_local, local_capacity
from service.config.experiment import Resolved
from service.runs.preflight import check_data, check_services
from service.sweeps.infeasible import mark_unbuildable, mark_unschedulable
from service.sweeps.trials import Trial, plan_trials
from trainables.errors import ExperimentError


def check_sweep(resolved: Resolved) -> None:
    """Refuse a sweep whose stages its workers would refuse later, or without a single point that could run.

    Raises:
        DistillError: one line.
    """
    experiment = resolved.experiment
    check_services(experiment, "sweep")
    trials = plan_trials(resolved)
    if is_local():
        mark_unschedulable(trials, local_capacity())
    check_any_runs(trials)
    searched = experiment.sweep.axes
    if "data.path" in searched:
        return
    teacher = experiment.teacher
    trains_base = bool(experiment.assistants) or (teacher is not None and teacher.weights is None)
    check_data(experiment, searched, trains_base=trains_base)
    mark_unbuildable(trials)  # such a point is a row, not an error
    check_any_runs(trials)


def check_any_runs(trials: Sequence[Trial]) -> None:
    """Refuse trials of which none is left to run. Raises ExperimentError: with the first one's reason."""
    if all(trial.outcome is not None for trial in trials):
        reason = trials[0].outcome.reason if trials[0].outcome else ""
        raise ExperimentError(f"sweep.space: none of its {len(trials)} points can run; the first: {reason}")
