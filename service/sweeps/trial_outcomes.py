"""The outcomes of trials that leave none of their own: stopped by the scheduler, or lost with their process."""

import logging
from collections.abc import Mapping
from threading import Event
from typing import Any

from ray.tune.experiment import Trial

from service.runs.outcome import Outcome, write_outcome
from service.runs.stages.assignment import Assignment
from service.runs.stored.stored_runs import fetch_stage
from service.runs.trial import ENDED
from service.runs.tune_errors import TrialErrorCallback
from service.sweeps.asha import stopped
from trainables.errors import StorageError
from trainables.rundir import RunDir

log = logging.getLogger("raydistill")


class TrialOutcomeCallback(TrialErrorCallback):
    """Writes a trial's outcome when Ray Tune ends it, so that a sweep that is killed later has it."""

    def __init__(self, run_dir: RunDir, assignments: Mapping[str, Assignment], session_ending: Event) -> None:
        super().__init__(run_dir, session_ending)
        self._run_dir, self._assignments = run_dir, assignments

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        # A file server may hide for a while what the trial's node has written: that its function ended, Ray knows.
        run_dir, reported = self._run_dir.trial(trial.config["trial"]), trial.last_result
        if reported.get(ENDED) or run_dir.result.exists():
            return
        try:
            fetch_stage(self._assignments[trial.config["trial"]].config)
        except StorageError as error:
            log.warning("trial %s was stopped, and its last records cannot be read: %s", trial.config["trial"], error)
        write_outcome(run_dir.result, stopped(run_dir.stage("student"), reported))

    def record(self, trial: Trial, outcome: Outcome) -> None:
        result = self._run_dir.trial(trial.config["trial"]).result
        if not result.exists():
            write_outcome(result, outcome)
