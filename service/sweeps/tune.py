"""Trials run by Ray Tune: of those that share workers a worker group is one trial of Tune's."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from service.cluster.resources import Reservation, living_nodes
from service.config.sweep import SweepConfig
from service.runs.result import RunResult
from service.runs.run_log import read_log
from service.runs.stages.assignment import Assignment
from service.runs.stored.stored_runs import ray_storage
from trainables.rundir import RunDir

if TYPE_CHECKING:
    from ray.tune import Callback, RunConfig


class SessionEnding(Event):
    """Set once the session ends. Ray Tune pickles what its callbacks have to its own files, of which nothing is restored."""

    def __reduce__(self) -> tuple[type[Event], tuple[()]]:
        return SessionEnding, ()


def tune_trials(
    sweep: SweepConfig, assignments: Mapping[str, Assignment], run_dir: RunDir, max_concurrent: int, session_ending: SessionEnding
) -> None:
    """Let Ray Tune run the trials; returns when each has an outcome, be it that the scheduler has stopped it.

    A trial whose process dies once the `session_ending` is set, or just before, has none.
    """
    prepare_tune()
    from ray import tune

    from service.runs.tune_internals import trial_class
    from service.sweeps.asha import asha_scheduler, reported_epochs
    from service.sweeps.trial_functions import run_trial
    from service.sweeps.trial_outcomes import TrialOutcomeCallback

    earlier, scheduler = {}, None
    if sweep.policy == "asha":
        # A trial must not run ahead of what may end it: it waits at each epoch until Ray has its report.
        assignments = {
            trial: replace(assignment, config=assignment.config.model_copy(update={"report_each_epoch": True}))
            for trial, assignment in assignments.items()
        }
        earlier = reported_epochs(read_log(run_dir))
        scheduler = asha_scheduler(sweep, earlier, ended=[trial for trial in earlier if trial not in assignments])
    function = partial(run_trial, assignments=dict(assignments))
    # Those that an earlier session had begun come first, so that asha knows of them when it compares the others.
    trials = sorted(assignments, key=lambda trial: (trial not in earlier, trial))
    # What is known of a sweep is in its log: nothing is restored from Tune's own.
    tune.Tuner(
        trial_class(function, living_nodes().trial_resources()),
        param_space={"trial": tune.grid_search(trials)},
        tune_config=tune.TuneConfig(
            max_concurrent_trials=max_concurrent,
            scheduler=scheduler,
            trial_name_creator=lambda trial: trial.config["trial"],
            trial_dirname_creator=lambda trial: trial.config["trial"],
        ),
        run_config=run_config(run_dir, TrialOutcomeCallback(run_dir, assignments, session_ending)),
    ).fit()


def prepare_tune() -> None:
    """Set up Ray Tune in this process, before it runs trials: no failure of a trial ends the sweep or floods the terminal."""
    # Asha's metric comes with epochs; a trial that failed before its first has none.
    os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
    os.environ.setdefault("TUNE_PRINT_ALL_TRIAL_ERRORS", "0")  # a trial's row says why it failed, and in which file the rest is
    from service.runs.tune_internals import install_actor_manager

    install_actor_manager()


def run_config(run_dir: RunDir, callback: Callback) -> RunConfig:
    """Where Ray Tune writes its own files, of each session of a sweep in a folder of their own."""
    from ray import tune

    name, storage = f"tune-{time.time_ns():x}", ray_storage(run_dir)
    return tune.RunConfig(name=name, storage_path=storage, verbose=0, callbacks=[callback])


def with_shared_starts(assignments: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """The same work for workers that measure several points: they reserve loader workers for the hungriest of their points.

    What else workers reserve is the same for all of their points.
    """
    workers = {trial: replace(assignment, loader_workers=0).reservation for trial, assignment in assignments.items()}
    most: dict[Reservation, int] = {}
    for trial, assignment in assignments.items():
        most[workers[trial]] = max(assignment.loader_workers, most.get(workers[trial], 0))
    return {trial: replace(assignment, loader_workers=most[workers[trial]]) for trial, assignment in assignments.items()}


def measure_points(
    guided: RunResult | None,
    assignments: Mapping[str, Assignment],
    run_dir: RunDir,
    max_concurrent: int,
    session_ending: SessionEnding,
) -> None:
    """Let Ray Tune run groups of workers that measure the points; returns when there are no more.

    `guided`: see `PointCoordinator`.

    `session_ending`: see `tune_trials`.
    """
    prepare_tune()
    import ray
    from ray import tune

    from service.runs.tune_internals import trial_class
    from service.search.coordinator import PointCoordinator
    from service.search.searcher import WorkerGroupOutcomeCallback, WorkerGroupSearcher
    from service.sweeps.trial_functions import run_worker_group
    from trainables.worker.ray_nodes import on_this_node

    # On the driver's node: where this node dies, so does the driver, and the sweep is resumed from its log.
    name, here = f"{run_dir.root.name}-points", on_this_node()
    actor = ray.remote(PointCoordinator).options(name=name, num_cpus=0, scheduling_strategy=here)
    coordinator = actor.remote(assignments, str(run_dir.root), guided)
    function = partial(run_worker_group, coordinator=coordinator, stops_early=guided is not None)
    trainable = trial_class(function, living_nodes().trial_resources())
    # As many worker groups as the coordinator starts: points may be measured again, so that their number is not known.
    tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=WorkerGroupSearcher(coordinator),
            num_samples=-1,
            max_concurrent_trials=max_concurrent,
            trial_name_creator=lambda trial: f"group-{trial.config['group']}",
            trial_dirname_creator=lambda trial: f"group-{trial.config['group']}",
        ),
        run_config=run_config(run_dir, WorkerGroupOutcomeCallback(run_dir, coordinator, session_ending)),
    ).fit()
