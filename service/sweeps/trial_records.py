"""How trials are shown and recorded in MLflow: a child run each, with its parameters, log lines and final numbers."""

from collections.abc import Sequence
from pathlib import Path

from service.config.dotted import flatten
from service.config.space import short_names
from service.runs.outcome import Outcome
from service.runs.session import Session, record_dataset
from service.runs.stages.run_stages import hang_tags
from service.sweeps.trials import Trial
from service.tracking import of_summary

WINNER = "raydistill.winner"
"""Tag of the best trial."""


class TrialRecords:
    """Begins and ends the records of a sweep's trials; without a tracker only the display gets their lines."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._timing = session.experiment.sweep.timing_steps is not None
        self._metric = session.experiment.sweep.figure

    def begin(self, trial: Trial, stage: str | None = None) -> None:
        """A child run in MLflow that follows the trial's epochs; a point that is wrong in itself has its own values alone.

        `stage`: that of the measurement that has begun; without one, the first.
        """
        tracker, run_dir = self._session.tracker, self._session.run_dir
        if tracker is None:
            return
        experiment = flatten(trial.resolved.experiment.model_dump(mode="json")) if trial.resolved else {}
        params = experiment | trial.params | {"data.loader_workers": trial.loader_workers}
        tracker.start_run(
            _key(trial),
            _name(trial),
            parent_key=self._session.key,
            params=params,
            tags={"raydistill.kind": "trial"},
            first_metric=self._metric if self._is_followed(trial) and trial.outcome is None else "",
        )
        record_dataset(self._session, _key(trial))
        if self._is_followed(trial):
            name = stage or f"trials/{trial.id}/student"
            tracker.follow(_key(trial), run_dir.events, name, f"{Path(name).name}/" if name.endswith("-init") else "")

    def end(self, trial: Trial) -> None:
        """Show and record how a trial ended."""
        outcome = trial.outcome or Outcome(status="failed")
        self._session.display.print(_line(trial, outcome))
        tracker, run_dir = self._session.tracker, self._session.run_dir.trial(trial.id)
        if tracker is None:
            return
        tags = {
            "status": outcome.status,
            "reason": outcome.reason,
            "trial_kind": trial.kind(self._timing),
            "oversubscribed": str(trial.oversubscribed),
            "measurements": str(trial.num_measurements),
        }
        last = run_dir.measurement(max(trial.num_measurements - 1, 0)).root.relative_to(self._session.run_dir.root)
        tracker.tags(_key(trial), tags | hang_tags(self._session.log.of(str(last))))
        if outcome.metrics:
            shown = of_summary(outcome.metrics, followed=self._is_followed(trial), first=self._metric)
            tracker.metrics(_key(trial), int(outcome.metrics.get("steps", 0)), shown, int(outcome.ended_s * 1000) or None)
        if run_dir.experiment.exists():
            tracker.artifact(_key(trial), run_dir.experiment)
        tracker.end_run(_key(trial), "FINISHED" if outcome.status in ("ok", "stopped") else "FAILED")

    def _is_followed(self, trial: Trial) -> bool:
        """Whether a trial has epochs to follow: one that ends after its steps are timed has none."""
        return trial.kind(self._timing) == "accuracy"

    def mark_winner(self, best: str | None, verdict: Sequence[str]) -> None:
        """Tag and describe the best trial, and untag the one that an earlier session of the sweep has tagged."""
        tagged = self._session.result.tagged_winner
        if tracker := self._session.tracker:
            if tagged not in (None, best):
                tracker.tags(f"trial/{tagged}", {WINNER: "false"})
                tracker.describe(f"trial/{tagged}", [])
            if best:
                tracker.tags(f"trial/{best}", {WINNER: "true"})
                tracker.describe(f"trial/{best}", verdict)
            self._session.save(tagged_winner=best)


def _key(trial: Trial) -> str:
    return f"trial/{trial.id}"


def _name(trial: Trial) -> str:
    """A trial's name in MLflow: `000 workers=2 batch=128`."""
    names = short_names(trial.params)
    return " ".join([trial.id, *(f"{names[key]}={value}" for key, value in trial.params.items())])


def _line(trial: Trial, outcome: Outcome) -> str:
    m = outcome.metrics
    numbers = f"{m['images_per_s']:.1f} images/s, {m['epoch_s']:.2f} s an epoch" if "epoch_s" in m else outcome.reason
    again = f", measured {trial.num_measurements} times" if trial.num_measurements > 1 else ""
    point = ", ".join(f"{key}={value}" for key, value in trial.params.items())
    return f"trial {trial.id} ({point}): {outcome.status}  {numbers}{again}"
