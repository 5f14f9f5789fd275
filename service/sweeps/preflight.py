"""Checks a sweep before Ray starts, and marks its points that cannot run. See `service.runs.preflight`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from service.cluster.resources import Cluster, is_local, local_capacity
from service.config.batch_size import refuse_auto
from service.config.experiment import Resolved
from service.config.sweep import ACCURACIES, TIME
from service.runs.dry_run import check_fits, note_cache_size, num_classes_of
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.preflight import check_data, check_services
from service.runs.unread_keys import note_unread
from service.sweeps.trials import Trial, plan_trials
from trainables.config import DataIdentity
from trainables.errors import DataError, ExperimentError
from trainables.rules import enough_images

_TRAINING_SPLIT_KEYS = {"data", "data.labels", "data.synthetic_images", "data.val_share"}
"""Keys that change how many training images one set has."""


def check_sweep(resolved: Resolved) -> tuple[Resolved, DataIdentity | None]:
    """Refuse a sweep that its workers would refuse later, or that has no point that can run.

    Returns the experiment with its `teacher.finetune` set, and the identity of its data, which is None if the sweep searches
    over `data.path` or `data.more`.

    Raises DistillError: the sweep is refused.
    """
    experiment = resolved.experiment
    refuse_auto(experiment, "sweep", "write a number, and batches to compare as sweep.space: {data.global_batch_size: [64, 128]}")
    if experiment.scale.min_workers is not None:
        raise ExperimentError("scale.min_workers: a trial has a fixed number of workers: write one number in scale.num_workers")
    times_only = experiment.sweep.timing_steps is not None and not experiment.sweep.is_time_to_accuracy
    if not times_only and (experiment.eval.asynchronous or "eval.asynchronous" in experiment.sweep.axes):
        raise ExperimentError("eval.asynchronous: a sweep's trials compete for room: leave it out, and their workers evaluate")
    if experiment.train.max_steps is not None and experiment.sweep.metric in (*ACCURACIES, TIME):
        raise ExperimentError(
            f"train.max_steps: a timing run has no accuracy, and sweep.metric is {experiment.sweep.metric}: leave one of them out"
        )
    check_services(experiment, "sweep")
    trials = plan_trials(resolved)
    if is_local():
        mark_unschedulable(trials, local_capacity())
    check_any_runs(trials)
    searched = experiment.sweep.axes
    note_unread(resolved, experiment.sweep.points or [experiment.sweep.space])
    if {"data.path", "data.more"} & set(searched):
        return resolved, None
    resolved, data = check_data(resolved, searched)
    mark_unbuildable(trials, data)  # such a point is a row, not an error
    check_any_runs(trials)
    if resolved.experiment.written_cache("sweep") is not None:
        note_cache_size(resolved.experiment, data.train.num_images, len(data.classes))
    return resolved, data


def check_any_runs(trials: Sequence[Trial]) -> None:
    """Raise ExperimentError, with the first trial's reason, if no trial can run."""
    if all(trial.outcome is not None for trial in trials):
        reason = trials[0].outcome.reason if trials[0].outcome else ""
        raise ExperimentError(f"sweep.space: none of its {len(trials)} points can run; the first: {reason}")


def mark_unschedulable(trials: Iterable[Trial], cluster: Cluster) -> None:
    """Mark trials that do not fit on the cluster `infeasible`, and those that reserve more CPUs than cores `oversubscribed`."""
    for trial in trials:
        if trial.resolved is None or (trial.outcome is not None and trial.loader_workers != "auto"):
            continue
        plan = Plan.on(trial.resolved.experiment, cluster)
        trial.loader_workers = plan.loader_workers
        trial.oversubscribed = cluster.oversubscribed(plan.reservation())
        if trial.outcome is None and (refusal := plan.refusal(cluster)):
            trial.outcome = Outcome(status="infeasible", reason=refusal)


def mark_unbuildable(trials: Iterable[Trial], data: DataIdentity | None = None) -> None:
    """Mark trials `infeasible` whose student cannot be built with its methods, or whose batch is larger than `data`.

    `data` is None if the sweep searches over the data.
    """
    for trial in trials:
        if trial.outcome is None and trial.resolved is not None:
            experiment = trial.resolved.experiment
            try:
                check_fits(experiment, num_classes_of(experiment.data), ["student"])
                other_images = _TRAINING_SPLIT_KEYS & trial.params.keys() or experiment.data.more
                batch = experiment.stage("student", Path("/"), {}).data
                if data and not other_images and (problem := enough_images(batch, data.train.num_images)):
                    raise ExperimentError(problem)
            except DataError:
                continue  # in a search over data.path, the trial itself reports bad data
            except ExperimentError as error:
                trial.outcome = Outcome(status="infeasible", reason=str(error))
