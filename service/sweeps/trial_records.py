"""How trials are shown and recorded in MLflow: a child run each, with its parameters, log lines and final numbers."""

from service.config.dotted import flatten
from service.runs.outcome import Outcome
from service.runs.session import Session, written_ms
from service.runs.stages.hangs import hang_tags
from service.sweeps.trials import Trial
from trainables.rundir import StageDir


class TrialRecords:
    """Begins and ends the records of a sweep's trials; without a tracker only the display gets their lines."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._timing = session.experiment.sweep.timing_steps is not None
        self._metric = session.experiment.sweep.figure
        self._followed: set[StageDir] = set()

    def begin(self, trial: Trial, stage: StageDir | None = None) -> None:
        """A child run in MLflow that follows the trial's numbers; a point that is wrong in itself has its own values alone.

        `stage`: the measurement that has begun; without one, the first.
        """
        tracker, run_dir = self._session.tracker, self._session.run_dir
        if tracker is None:
            return
        experiment = flatten(trial.resolved.experiment.model_dump(mode="json")) if trial.resolved else {}
        params = experiment | trial.params | {"data.loader_workers": trial.loader_workers}
        name = f"{run_dir.root.name}/{trial.id}"
        timed_only = self._ends_after_timing(trial)
        tracker.start_run(
            _key(trial),
            name,
            parent_key=self._session.key,
            params=params,
            tags={"raydistill.kind": "trial"},
            first_metric=self._metric if not timed_only and trial.outcome is None else "",
        )
        if not timed_only:
            self._follow(trial, stage or run_dir.trial(trial.id).measurement(0))

    def end(self, trial: Trial) -> None:
        """Show and record how a trial ended."""
        self._session.display.unfollow(trial.id)
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
        last = run_dir.measurement(max(trial.num_measurements - 1, 0))
        tracker.tags(_key(trial), tags | hang_tags(last))
        if outcome.metrics:
            m = outcome.metrics
            first = {name: m[name] for name in (self._metric, "images_per_s") if name in m}
            tracker.metrics(_key(trial), int(m.get("steps", 0)), first | m, written_ms(run_dir.result))
        if self._ends_after_timing(trial):  # after its final numbers: MLflow's compare page opens on a run's first metric
            for number in range(trial.num_measurements):
                self._follow(trial, run_dir.measurement(number))
        if run_dir.experiment.exists():
            tracker.artifact(_key(trial), run_dir.experiment)
        tracker.end_run(_key(trial), "FINISHED" if outcome.status in ("ok", "stopped") else "FAILED")

    def _ends_after_timing(self, trial: Trial) -> bool:
        """Whether a trial ends after its steps are timed: its log lines are of interest when it has ended, if at all."""
        return self._timing and trial.speed_trial is None

    def _follow(self, trial: Trial, stage: StageDir) -> None:
        """Send the log lines of one of the trial's measurements to MLflow; once, however often its point is measured again."""
        if self._session.tracker and stage not in self._followed:
            self._followed.add(stage)
            self._session.tracker.follow(_key(trial), stage.metrics, f"{stage.root.name}/")


def _key(trial: Trial) -> str:
    return f"trial/{trial.id}"


def _line(trial: Trial, outcome: Outcome) -> str:
    m = outcome.metrics
    numbers = f"{m['images_per_s']:.1f} images/s, {m['epoch_s']:.2f} s an epoch" if "epoch_s" in m else outcome.reason
    again = f", measured {trial.num_measurements} times" if trial.num_measurements > 1 else ""
    point = ", ".join(f"{key}={value}" for key, value in trial.params.items())
    return f"trial {trial.id} ({point}): {outcome.status}  {numbers}{again}"
