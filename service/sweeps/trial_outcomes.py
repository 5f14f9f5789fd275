"""Records outcomes of trials that cannot record their own: stopped by the scheduler, raised an error, or their process died."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from ray.tune import Callback
from ray.tune.experiment import Trial

from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.run_log import as_json
from service.runs.stages.assignment import Assignment
from service.runs.stored.stored_runs import uri_of
from service.sweeps.asha import stopped
from service.sweeps.trial_functions import ENDED
from service.sweeps.tune_internals import ActorOutOfMemoryError
from trainables.failures import OUT_OF_MEMORY_KINDS, Failure, failure_of
from trainables.rundir import RunDir

SESSION_END_GRACE_S = 2.0
"""A signal such as SIGTERM may end the trials' processes first; the session notices it within this time."""


class TrialErrorCallback(Callback):  # type: ignore[misc]
    """Records outcomes of trials that Ray Tune ends with an error, in one line that names the file with the details.

    If a trial's process dies because the session is ending, nothing is recorded, and the next session continues the trial.
    To find out, Tune's loop waits for `SESSION_END_GRACE_S`.
    """

    def __init__(self, run_dir: RunDir, session_ending: Event) -> None:
        self._scheme = "s3://" if uri_of(run_dir.root) else ""  # Tune's paths lack it
        self._session_ending = session_ending

    @abstractmethod
    def record(self, trial: Trial, outcome: Outcome) -> None:
        """Write the outcome of a trial."""

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        where = f"see {self._scheme}{trial.path}/{Path(trial.error_file).name}"
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes()) if trial.pickled_error_file else None
        if failure := _failure(error):
            is_oom = failure.kind in OUT_OF_MEMORY_KINDS
            reason = f"{failure}; {where}"
            self.record(trial, Outcome(status="oom" if is_oom else "failed", reason=reason, failure=failure.kind))
        elif not self._session_ending.wait(SESSION_END_GRACE_S):
            # Tune has only the text of other errors, below a line that counts them.
            text = str(error) if error is not None else Path(trial.error_file).read_text(encoding="utf-8").partition("\n")[2]
            lines = text.strip().splitlines() or [""]
            died = isinstance(error, RayActorError)
            reason = f"the trial's process died: {lines[0]}" if died else f"Ray Tune ended the trial: {lines[-1]}"
            self.record(trial, Outcome(status="failed", reason=f"{reason}; {where}"))


def _failure(error: Exception | None) -> Failure | None:
    """Return what a trial's function raised, or out of memory. None if the end of the session may have caused the error."""
    if isinstance(error, ActorOutOfMemoryError):
        return Failure("node_out_of_memory", "the node ran out of memory: Ray killed the trial's process")
    return failure_of(error.cause, None) if isinstance(error, RayTaskError) else None


class TrialOutcomeCallback(TrialErrorCallback):
    """Records a trial's outcome as soon as Ray Tune ends it, so that it survives a kill of the sweep."""

    def __init__(self, run_dir: RunDir, assignments: Mapping[str, Assignment], session_ending: Event) -> None:
        super().__init__(run_dir, session_ending)
        self._assignments = assignments

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        if not trial.last_result.get(ENDED):
            self.record(trial, stopped(self._assignments[trial.config["trial"]].events))

    def record(self, trial: Trial, outcome: Outcome) -> None:
        id = trial.config["trial"]
        recorder = self._assignments[id].log
        if not recorder.of(f"trials/{id}"):
            recorder.record([event("trial_ended", trial=id, outcome=as_json(outcome))])


class WorkerGroupOutcomeCallback(TrialErrorCallback):
    """Reports to the coordinator why the function of a worker group raised or died; the others report themselves."""

    def __init__(self, run_dir: RunDir, coordinator: Any, session_ending: Event) -> None:
        super().__init__(run_dir, session_ending)
        self._coordinator = coordinator

    def record(self, trial: Trial, outcome: Outcome) -> None:
        ray.get(self._coordinator.finish.remote(trial.config["group"], outcome))
