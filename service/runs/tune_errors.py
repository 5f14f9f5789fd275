"""Why Ray Tune ended a trial: what its function raised, or that its process died."""

from pathlib import Path
from threading import Event

from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from ray.tune.experiment import Trial

from service.runs.outcome import Outcome
from trainables.failures import OUT_OF_MEMORY_KINDS, failure_of

ENDING_S = 2.0
"""What ends a session, as SIGTERM does, ends its trials' processes too: the session notices within so many seconds."""


def outcome_of(trial: Trial, session_ending: Event) -> Outcome | None:
    """The outcome of a trial that Tune ended with an error: in one line, with the file that has the rest.

    None: the session is ending, and its trials with it, which the next one continues.
    """
    where = f"see {trial.path}/{Path(trial.error_file).name}"
    error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes()) if trial.pickled_error_file else None
    raised = error.cause if isinstance(error, RayTaskError) else None
    if session_ending.wait(ENDING_S if raised is None else 0):
        return None
    if raised is not None:
        failure = failure_of(raised, None)
        return Outcome(
            status="oom" if failure.kind in OUT_OF_MEMORY_KINDS else "failed",
            reason=f"{failure}; {where}",
            failure=failure.kind,
        )
    # Of other errors Tune has the text alone, below a line of its own that counts them.
    text = str(error) if error is not None else Path(trial.error_file).read_text().partition("\n")[2]
    lines = text.strip().splitlines() or [""]
    died = isinstance(error, RayActorError)
    reason = f"the process that led its workers died: {lines[0]}" if died else f"Ray Tune ended the trial: {lines[-1]}"
    return Outcome(status="failed", reason=f"{reason}; {where}")
