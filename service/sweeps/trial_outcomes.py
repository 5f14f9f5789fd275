"""Records outcomes of trials that cannot record their own: stopped by the scheduler, or their process died."""

from collections.abc import Mapping
from threading import Event
from typing import Any

from ray.tune.experiment import Trial

from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.run_log import as_json
from service.runs.stages.assignment import Assignment
from service.runs.tune_errors import TrialErrorCallback
from service.sweeps.asha import stopped
from service.sweeps.trial_functions import ENDED
from trainables.rundir import RunDir


class TrialOutcomeCallback(TrialErrorCallback):
    """Records a trial's outcome as soon as Ray Tune ends it, so that it survives a kill of the sweep."""

    def __init__(self, run_dir: RunDir, assignments: Mapping[str, Assignment], session_ending: Event) -> None:
        super().__init__(run_dir, session_ending)
        self._assignments = assignments

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        if not trial.last_result.get(ENDED):
            self.record(trial, stopped(self._assignments[trial.config["trial"]].events, trial.last_result))

    def record(self, trial: Trial, outcome: Outcome) -> None:
        id = trial.config["trial"]
        recorder = self._assignments[id].log
        if not recorder.of(f"trials/{id}"):
            recorder.record([event("trial_ended", trial=id, outcome=as_json(outcome))])
