"""The outcomes of trials that leave none of their own: stopped by the scheduler, or lost with their process."""

from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from service.runs.outcome import write_outcome
from service.runs.tune_errors import outcome_of
from service.sweeps.asha import stopped
from trainables.rundir import RunDir


class TrialEnds(Callback):  # type: ignore[misc]
    """Writes them when Ray Tune ends the trials, so that a sweep that is killed later has them."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        run_dir = self._run_dir.trial(trial.config["trial"])
        if not run_dir.result.exists():
            write_outcome(run_dir.result, stopped(run_dir.stage("student")))

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        run_dir = self._run_dir.trial(trial.config["trial"])
        if not run_dir.result.exists():
            write_outcome(run_dir.result, outcome_of(trial))
