"""Why Ray Tune ended a trial: what its function raised, or that its process died."""

from pathlib import Path

from ray import cloudpickle
from ray.exceptions import RayTaskError
from ray.tune.experiment import Trial

from service.runs.outcome import Outcome
from trainables.failures import OUT_OF_MEMORY_KINDS, failure_of


def outcome_of(trial: Trial) -> Outcome:
    """The outcome of a trial that Tune ended with an error: in one line, with the file that has the rest."""
    where = f"see {trial.path}/{Path(trial.error_file).name}"
    error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes()) if trial.pickled_error_file else None
    if isinstance(error, RayTaskError):
        failure = failure_of(error.cause, None)
        return Outcome(
            status="oom" if failure.kind in OUT_OF_MEMORY_KINDS else "failed",
            reason=f"{failure}; {where}",
            failure=failure.kind,
        )
    # Of other errors Tune has the text alone, below a line of its own that counts them.
    text = str(error) if error is not None else Path(trial.error_file).read_text().partition("\n")[2]
    first_line = next(iter(text.strip().splitlines()), "")
    return Outcome(status="failed", reason=f"the process that led its workers died: {first_line}; {where}")
