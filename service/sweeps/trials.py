"""The trials of a sweep: one per point of its space, also for points that cannot run, and trainings to the target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.config.dotted import flatten
from service.config.experiment import Resolved
from service.config.schema import Experiment
from service.config.space import LOADER_WORKERS, SCALE_AXES, points
from service.runs.outcome import Outcome
from service.runs.result import TrialRow
from service.runs.run_log import ResultFold
from service.runs.session import Session
from trainables.errors import ExperimentError
from trainables.failures import ENVIRONMENT_KINDS

PROBE_LOG_STEPS = 4


@dataclass
class Trial:
    """One point of the sweep. `outcome` is None until it has ended."""

    id: str
    params: dict[str, Any]
    resolved: Resolved | None
    outcome: Outcome | None = None
    oversubscribed: bool = False
    loader_workers: int | str = "auto"
    speed_trial: str | None = None
    """If this is a training to the target: the id of the trial that measured the point's speed."""

    @property
    def num_measurements(self) -> int:
        """How often the point was measured."""
        return 0 if self.outcome is None else len(self.outcome.each_measurement)


def rows_of(trials: Sequence[Trial], base: Resolved, *, timing: bool) -> list[TrialRow]:
    """Return the trials' rows for `result.json`. `base` is the sweep's experiment; `timing` says whether it times steps."""
    base_values = flatten(base.experiment.model_dump(mode="json"))
    rows = []
    for trial in trials:
        values = {**base_values, **trial.params, LOADER_WORKERS: trial.loader_workers}
        fields = {
            **dict(trial.outcome or Outcome(status="pending")),
            "id": trial.id,
            "params": trial.params,
            "kind": "timing" if timing and not trial.speed_trial else "accuracy",
            "oversubscribed": trial.oversubscribed,
            "scale": {key: values[key] for key in SCALE_AXES},
            "speed_trial": trial.speed_trial,
        }
        rows.append(TrialRow.model_validate(fields))
    return rows


def plan_trials(resolved: Resolved) -> list[Trial]:
    """Return a trial for every point of the space. Invalid points are `infeasible` already.

    Raises ExperimentError: the space has no points.
    """
    sweep = resolved.experiment.sweep
    found = list(sweep.points) or points(sweep.space, sweep.policy, sweep.num_samples, resolved.experiment.seed)
    timing: dict[str, Any] = {"train.max_steps": sweep.timing_steps} if sweep.timing_steps is not None else {}
    if sweep.target_pct is not None and not sweep.is_time_to_accuracy:
        timing["train.until_top1_pct"] = sweep.target_pct
    if sweep.policy == "guided":  # a probe may end after any logged step
        timing["train.log_every"] = min(PROBE_LOG_STEPS, resolved.experiment.train.log_every)
    width = max(3, len(str(len(found) - 1)))
    trials = []
    for number, point in enumerate(found):
        trial = Trial(
            f"{number:0{width}d}",
            point,
            None,
            loader_workers=point.get(LOADER_WORKERS, resolved.experiment.data.loader_workers),
        )
        try:
            trial.resolved = resolved.override({**point, **timing}, "trial")
        except ExperimentError as error:
            trial.outcome = Outcome(status="infeasible", reason=str(error).splitlines()[0].removeprefix("trial: "))
        trials.append(trial)
    return trials


def load_outcomes(trials: list[Trial], fold: ResultFold) -> None:
    """Set the outcomes that the log has for the trials, from this session or an earlier one."""
    for trial in trials:
        trial.outcome = fold.outcome_of(trial.id) or trial.outcome


def may_retry(experiment: Experiment) -> bool:
    """Whether trials that failed because of their environment run again. Asha and guided searches count them as ended."""
    return experiment.sweep.policy not in ("asha", "guided")


def has_trials_to_retry(experiment: Experiment, rows: Sequence[TrialRow]) -> bool:
    """Whether a complete sweep has trials to run again."""
    return may_retry(experiment) and any(row.failure in ENVIRONMENT_KINDS for row in rows)


def retry_trials(trials: list[Trial], session: Session) -> None:
    """Reset trials that waited for nodes in vain, or whose disk or store failed, so that they run again."""
    for trial in trials:
        if trial.outcome is not None and trial.outcome.failure in ENVIRONMENT_KINDS:
            session.record("discarded", trial=trial.id)
            trial.outcome = None


def target_trial(base: Resolved, speed_trial: Trial, until_s: float | None) -> Trial:
    """Return the training to the target of a point whose speed is known."""
    goal = {"train.until_top1_pct": base.experiment.sweep.target_pct, "train.until_s": until_s}
    resolved = base.override({**speed_trial.params, LOADER_WORKERS: speed_trial.loader_workers, **goal}, "trial")
    return replace(speed_trial, id=_training_id(speed_trial), resolved=resolved, outcome=None, speed_trial=speed_trial.id)


def _training_id(speed_trial: Trial) -> str:
    return f"{speed_trial.id}-trained"


def finished_target_trials(speed_trials: list[Trial], fold: ResultFold) -> list[Trial]:
    """Return the trainings to the target that earlier sessions of the sweep finished."""
    outcomes = {trial.id: fold.outcome_of(_training_id(trial)) for trial in speed_trials}
    return [
        replace(trial, id=_training_id(trial), resolved=None, outcome=outcomes[trial.id], speed_trial=trial.id)
        for trial in speed_trials
        if outcomes[trial.id]
    ]
