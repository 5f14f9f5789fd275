"""The trials of a sweep: every point of its space, those that cannot run, and the trainings that follow some; resumable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.config.dotted import flatten
from service.config.experiment import Resolved, read_resolved
from service.config.schema import Experiment
from service.config.space import LOADER_WORKERS, SCALE_AXES, SpaceError, points
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
    """Of a training to the target: the trial that had measured the point's speed."""

    def kind(self, timing: bool) -> str:
        """What the trial's row is about, in a sweep that is a `timing` one or not."""
        return "timing" if timing and not self.speed_trial else "accuracy"

    def _row(self, base: Mapping[str, Any], timing: bool) -> TrialRow:
        """See `rows_of`; `base` is the sweep's own experiment by dotted keys."""
        values = {**base, **self.params, LOADER_WORKERS: self.loader_workers}
        outcome = self.outcome or Outcome(status="pending")
        fields = dict(outcome) if outcome.measurements else {k: v for k, v in dict(outcome).items() if k != "measurements"}
        return TrialRow.model_validate(
            {
                **fields,
                "id": self.id,
                "params": self.params,
                "kind": self.kind(timing),
                "oversubscribed": self.oversubscribed,
                "scale": {key: values[key] for key in SCALE_AXES},
                **({"speed_trial": self.speed_trial} if self.speed_trial else {}),
            }
        )

    @property
    def num_measurements(self) -> int:
        """How often the point was measured."""
        return 0 if self.outcome is None else len(self.outcome.each_measurement)


def rows_of(trials: Sequence[Trial], base: Resolved, *, timing: bool) -> list[TrialRow]:
    """The trials in `result.json`, in a sweep of the experiment `base` that is a `timing` one or not."""
    values = flatten(base.experiment.model_dump(mode="json"))
    return [trial._row(values, timing) for trial in trials]


def plan_trials(resolved: Resolved) -> list[Trial]:
    """Every point of the space, those that are wrong in themselves already `infeasible`.

    Raises:
        ExperimentError: nothing to search.
    """
    sweep = resolved.experiment.sweep
    try:
        found = list(sweep.points) or points(sweep.space, sweep.policy, sweep.num_samples, resolved.experiment.seed)
    except SpaceError as error:
        raise ExperimentError(f"sweep.space: {error}") from error
    timing: dict[str, Any] = {"train.max_steps": sweep.timing_steps} if sweep.timing_steps is not None else {}
    if sweep.target_pct is not None and not sweep.is_time_to_accuracy:
        timing["train.until_top1_pct"] = sweep.target_pct
    if sweep.policy == "guided":  # a probe may end where it is logged
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
    """Take the outcomes that trials have on record, in this session of a sweep or an earlier one."""
    for trial in trials:
        trial.outcome = fold.outcome_of(trial.id) or trial.outcome


def may_retry(experiment: Experiment) -> bool:
    """Whether trials that their environment ended run again; in a policy's own records they have ended."""
    return experiment.sweep.policy not in ("asha", "guided")


def has_trials_to_retry(experiment: Experiment, rows: Sequence[TrialRow]) -> bool:
    """Whether a sweep that is complete has trials to run again."""
    return may_retry(experiment) and any(row.failure in ENVIRONMENT_KINDS for row in rows)


def retry_trials(trials: list[Trial], session: Session) -> None:
    """Let the trials run again that waited for nodes in vain, or whose disk or store failed."""
    for trial in trials:
        if trial.outcome is not None and trial.outcome.failure in ENVIRONMENT_KINDS:
            session.record("discarded", trial=trial.id)
            trial.outcome = None


def training_of(base: Resolved, speed_trial: Trial, until_s: float | None) -> Trial:
    """The training to the target of a point whose speed is known."""
    goal = {"train.until_top1_pct": base.experiment.sweep.target_pct, "train.until_s": until_s}
    resolved = base.override({**speed_trial.params, LOADER_WORKERS: speed_trial.loader_workers, **goal}, "trial")
    return _training(speed_trial, resolved)


def _training(speed_trial: Trial, resolved: Resolved) -> Trial:
    """The training of a trial's point, with the experiment `resolved`."""
    workers = resolved.experiment.data.loader_workers
    return Trial(
        training_id(speed_trial), speed_trial.params, resolved, None, speed_trial.oversubscribed, workers, speed_trial.id
    )


def training_id(speed_trial: Trial) -> str:
    return f"{speed_trial.id}-trained"


def finished_trainings(speed_trials: list[Trial], session: Session) -> list[Trial]:
    """The trainings to the target that an earlier, interrupted session of the sweep has finished."""
    done = [trial for trial in speed_trials if session.fold.outcome_of(training_id(trial))]
    experiments = [session.run_dir.trial(training_id(trial)).experiment for trial in done]
    trainings = [_training(trial, read_resolved(path)) for trial, path in zip(done, experiments, strict=True)]
    load_outcomes(trainings, session.fold)
    return trainings
