"""Runs trials with Ray Tune. Trials that share workers run as one Tune trial per worker group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

from service.cluster.resources import Reservation, living_nodes
from service.config.sweep import SweepConfig
from service.runs.result import RunResult
from service.runs.run_log import read_log
from service.runs.stages.assignment import Assignment
from service.runs.stored.stored_runs import ray_storage
from trainables.rundir import RunDir

if TYPE_CHECKING:
    from ray.tune import Callback


class SessionEnding(Event):
    """Set once the session ends. It must be picklable because Ray Tune pickles its callbacks, though they are never restored."""

    def __reduce__(self) -> tuple[type[Event], tuple[()]]:
        return SessionEnding, ()


def tune_trials(
    sweep: SweepConfig, assignments: Mapping[str, Assignment], run_dir: RunDir, max_concurrent: int, session_ending: SessionEnding
) -> None:
    """Run the trials with Ray Tune. Returns when each has ended or was stopped by the scheduler.

    A trial whose process dies after `session_ending` is set, or just before, gets no outcome.
    """
    from ray import tune

    from service.sweeps.asha import asha_scheduler, reported_epochs
    from service.sweeps.trial_functions import run_trial
    from service.sweeps.trial_outcomes import TrialOutcomeCallback

    earlier, scheduler = {}, None
    if sweep.policy == "asha":
        # A trial must not run ahead of the scheduler: after each epoch it waits until Ray has its report.
        assignments = {
            trial: replace(assignment, config=assignment.config.model_copy(update={"report_each_epoch": True}))
            for trial, assignment in assignments.items()
        }
        earlier = reported_epochs(read_log(run_dir))
        scheduler = asha_scheduler(sweep, earlier, ended=[trial for trial in earlier if trial not in assignments])
    # Trials that an earlier session began come first, so that ASHA compares the others with them.
    trials = sorted(assignments, key=lambda trial: (trial not in earlier, trial))
    _run_tune(
        partial(run_trial, assignments=dict(assignments)),
        TrialOutcomeCallback(run_dir, assignments, session_ending),
        run_dir,
        lambda trial: trial.config["trial"],
        space={"trial": tune.grid_search(trials)},
        max_concurrent_trials=max_concurrent,
        scheduler=scheduler,
    )


def _run_tune(
    function: Any, callback: Callback, run_dir: RunDir, names: Callable[[Any], str], space: Any = None, **options: Any
) -> None:
    """Run Ray Tune to its end, with `options` of its `TuneConfig`. No failing trial ends the sweep or floods the terminal.

    Its files are in a new folder for each session, as the log has all state of a sweep.
    """
    from ray import tune

    from service.sweeps.tune_internals import install_actor_manager, trial_class

    # A trial that fails before its first epoch has no metric for ASHA.
    os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
    os.environ.setdefault("TUNE_PRINT_ALL_TRIAL_ERRORS", "0")  # a trial's row has the reason and the file with the details
    install_actor_manager()
    storage = ray_storage(run_dir)
    tune.Tuner(
        trial_class(function, living_nodes().trial_resources()),
        param_space=space,
        tune_config=tune.TuneConfig(trial_name_creator=names, trial_dirname_creator=names, **options),
        run_config=tune.RunConfig(name=f"tune-{time.time_ns():x}", storage_path=storage, verbose=0, callbacks=[callback]),
    ).fit()


def with_shared_reservations(assignments: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Let points whose reservations differ only in loader workers share worker groups: each reserves the largest number."""
    workers = {trial: replace(assignment, loader_workers=0).reservation for trial, assignment in assignments.items()}
    max_loader_workers: dict[Reservation, int] = {}
    for trial, assignment in assignments.items():
        max_loader_workers[workers[trial]] = max(assignment.loader_workers, max_loader_workers.get(workers[trial], 0))
    return {trial: replace(each, loader_workers=max_loader_workers[workers[trial]]) for trial, each in assignments.items()}


def measure_points(
    guided: RunResult | None,
    assignments: Mapping[str, Assignment],
    run_dir: RunDir,
    max_concurrent: int,
    session_ending: SessionEnding,
) -> None:
    """Measure the points with worker groups that Ray Tune runs. Returns when there are no more points.

    For `guided` see `PointCoordinator`, for `session_ending` see `tune_trials`.
    """
    import ray

    from service.search.coordinator import PointCoordinator
    from service.search.searcher import WorkerGroupSearcher
    from service.sweeps.trial_functions import run_worker_group
    from service.sweeps.trial_outcomes import WorkerGroupOutcomeCallback
    from trainables.worker.ray_nodes import on_this_node

    # On the driver's node: the coordinator cannot die without the driver, and the sweep then resumes from its log.
    name, here = f"{run_dir.root.name}-points", on_this_node()
    actor = ray.remote(PointCoordinator).options(name=name, num_cpus=0, scheduling_strategy=here)
    coordinator = actor.remote(assignments, str(run_dir.root), guided)
    _run_tune(
        partial(run_worker_group, coordinator=coordinator, stops_early=guided is not None),
        WorkerGroupOutcomeCallback(run_dir, coordinator, session_ending),
        run_dir,
        lambda trial: f"group-{trial.config['group']}",
        search_alg=WorkerGroupSearcher(coordinator),
        num_samples=-1,  # the number of worker groups is open, as points may be measured again
        reuse_actors=True,  # a group's process, whose start takes seconds, starts the next group too
        max_concurrent_trials=max_concurrent,
    )
