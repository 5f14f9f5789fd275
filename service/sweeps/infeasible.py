"""Points that cannot run, found before anything starts: too large for the cluster, or with models and methods that do not fit."""

from __future__ import annotations

from collections.abc import Iterable

from service.cluster.resources import Cluster
from service.runs.dry_run import check_fits, num_classes_of
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.sweeps.trials import Trial
from trainables.errors import DataError, ExperimentError


def mark_unschedulable(trials: Iterable[Trial], cluster: Cluster) -> None:
    """Mark as `infeasible` what does not fit on the cluster, as `oversubscribed` what has fewer real cores than it reserves."""
    for trial in trials:
        if trial.resolved is None or (trial.outcome is not None and trial.loader_workers != "auto"):
            continue
        plan = Plan.on(trial.resolved.experiment, cluster)
        trial.loader_workers = plan.loader_workers
        trial.oversubscribed = cluster.oversubscribed(plan.reservation())
        if trial.outcome is None and (refusal := plan.refusal(cluster)):
            trial.outcome = Outcome(status="infeasible", reason=refusal)


def mark_unbuildable(trials: Iterable[Trial]) -> None:
    """Mark as `infeasible` the points whose student could not be built with its methods."""
    for trial in trials:
        if trial.outcome is None and trial.resolved is not None:
            experiment = trial.resolved.experiment
            try:
                check_fits(experiment, num_classes_of(experiment.data.path, experiment.data.synthetic_classes), ["student"])
            except DataError:
                continue  # a search over data.path: the trial itself says what is wrong with it
            except ExperimentError as error:
                trial.outcome = Outcome(status="infeasible", reason=str(error))
