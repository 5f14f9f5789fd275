"""Passes trials to Ray Tune, shows their progress, and records each as it ends."""

import contextlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from service.cluster.resources import Cluster
from service.config.sweep import ACCURACIES, TIME, SweepConfig
from service.runs.events import Event
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.session import Session, start_tracking
from service.runs.stages.assignment import Assignment
from service.sweeps.trials import Trial, load_outcomes, rows_of
from service.sweeps.tune import SessionEnding, measure_points, tune_trials, with_shared_reservations
from trainables.errors import DistillError
from trainables.rundir import StageDir, write_text
from trainables.throttled import Throttled

TRIALS_GAUGE = ("raydistill_trials", "trials of a sweep that are done, running or waiting")
"""A gauge and its description, as in `trainables.worker.reporter.GAUGES`. Its label `state` is `done`, `running` or `waiting`."""


@dataclass(frozen=True)
class TeacherSource:
    """The students' teacher: its weights, and the names of the `teacher.service` actors."""

    weights: str | None
    actors: tuple[str, ...]


def run_pending(session: Session, trials: list[Trial], pending: list[Trial], cluster: Cluster, teacher: TeacherSource) -> None:
    """Run the pending trials with Ray Tune, recording each as it ends. A guided search may also measure other points again."""
    guided = session.experiment.sweep.policy == "guided" and not any(trial.speed_trial for trial in pending)
    candidates = [trial for trial in trials if not trial.speed_trial] if guided else pending
    assignments = assign(session, candidates, cluster, teacher)
    save_rows(session, trials)
    if not assignments:
        return
    if shares_workers(session.experiment.sweep, assignments.values()):
        assignments = with_shared_reservations(assignments)
        run = partial(measure_points, session.result if guided else None)
    else:
        run = partial(tune_trials, session.experiment.sweep)
    max_concurrent, session_ending = concurrency(session, assignments, cluster), SessionEnding()
    watch = TrialWatch(session, trials, max_concurrent, guided=guided)
    with session.display.reading(watch.take):
        try:
            session.wait_for(lambda: run(assignments, session.run_dir, max_concurrent, session_ending), watch.tick)
        except BaseException:
            session_ending.set()
            with contextlib.suppress(OSError, DistillError):  # such as a full disk; the original error matters more
                watch.finish()
            raise
        watch.finish()


def shares_workers(sweep: SweepConfig, assignments: Iterable[Assignment]) -> bool:
    """Whether worker groups run several trials each; otherwise each trial has its own workers.

    Timing runs share workers. Full trainings do if they are compared by speed and `Assignment.can_follow_others`.
    """
    by_speed = sweep.metric not in (*ACCURACIES, TIME)
    return all(each.can_follow_others and (by_speed or each.config.train.max_steps is not None) for each in assignments)


def assign(session: Session, trials: Sequence[Trial], cluster: Cluster, teacher: TeacherSource) -> dict[str, Assignment]:
    """Return the student stage of each trial that can run, by trial id, and write each pending trial's `experiment.yaml`."""
    assignments = {}
    for trial in trials:
        if trial.resolved is None or (trial.outcome is not None and trial.outcome.status == "infeasible"):
            continue
        run_dir = session.run_dir.trial(trial.id)
        if trial.resolved.experiment.train.max_steps is not None:  # a killed measurement cannot be continued
            unfinished = run_dir.measurement(trial.num_measurements)
            shutil.rmtree(unfinished.root, ignore_errors=True)
            if session.log.of(name := str(unfinished.root.relative_to(session.run_dir.root))):
                session.log.record("discarded", name)
        if trial.outcome is None:
            write_text(run_dir.experiment, trial.resolved.to_yaml())
        plan = Plan.on(trial.resolved.experiment, cluster, session.result.accepted_data)
        labels = {"run": session.run_dir.root.name, "trial": trial.id}
        assignment = plan.assign("student", run_dir, labels, teacher.weights, teacher.actors, session.run_dir)
        limit_s = session.experiment.sweep.trial_limit_s
        assignments[trial.id] = assignment.recorded_by(session.log.recorder, limit_s)
    return assignments


def concurrency(session: Session, assignments: Mapping[str, Assignment], cluster: Cluster) -> int:
    """Return how many trials may run at a time. If they are compared by speed, none may slow down another."""
    config, reservations = session.experiment.sweep, [assignment.reservation for assignment in assignments.values()]
    count = min(cluster.max_concurrent(reservation, config.max_concurrent) for reservation in reservations)
    isolated, shared = count, "teacher.service"
    if config.metric not in ACCURACIES:
        if any(reservation.service for reservation in reservations):
            isolated = 1
        elif cluster.real_cpus is not None:
            isolated = max(1, cluster.real_cpus // max(reservation.total_cpus for reservation in reservations))
            shared = f"this machine's {cluster.real_cpus} cores"
    if isolated < count:
        trials = "1 trial" if isolated == 1 else f"{isolated} trials"
        session.display.print(f"running {trials} at a time, not {count}: more would compete for {shared}")
    return min(isolated, count)


class TrialWatch:
    """Follows trials through the log while Ray Tune runs them. `tick` is called a few times per second.

    Writing `result.json` with thousands of trials is slow, so it is throttled to at most a tenth of the time.
    """

    def __init__(self, session: Session, trials: list[Trial], max_concurrent: int, *, guided: bool = False) -> None:
        """`guided`: the number of points that will be measured is unknown until the end."""
        from trainables.worker.gauges import Gauge

        name, text = TRIALS_GAUGE
        self._gauge = Gauge(name, description=text, tag_keys=("run", "state"))
        self._max_concurrent = max_concurrent
        self._session, self._guided = session, guided
        self._trials = {trial.id: trial for trial in trials}
        self._running = set[str]()
        self._unsaved = False
        self._save = Throttled(self._write_snapshot)

    def tick(self) -> None:
        """Show the progress, and write `result.json` if a trial has ended."""
        start_tracking(self._session)
        self._show()
        if self._unsaved:
            self._save()

    def finish(self) -> None:
        """Read the log to its end, and show and record the trials."""
        self._session.display.tick()
        self._show()
        save_rows(self._session, list(self._trials.values()))

    def _write_snapshot(self) -> None:
        self._unsaved = False
        self._session.write_snapshot()

    def take(self, event: Event) -> None:
        """Handle an event of the log that says that a trial has begun or ended."""
        display, trial = self._session.display, self._trials.get(event.get("trial", ""))
        if trial is not None and event["kind"] == "stage_begun":
            self._running.add(trial.id)
            folder = StageDir(self._session.run_dir.root / event["stage"])
            display.follow(trial.id, event["stage"], folder, self._session.log.of(event["stage"]))
        elif trial is not None and event["kind"] == "trial_ended":
            self._running.discard(trial.id)
            display.unfollow(f"trials/{trial.id}")  # also if Tune stopped it between two epochs
            load_outcomes([trial], self._session.fold)
            display.print(trial_line(trial))
            self._unsaved = True

    def _show(self) -> None:
        """Show how far the sweep is, and set the gauge."""
        trials, running = list(self._trials.values()), len(self._running)
        pending = [trial for trial in trials if trial.outcome is None]
        num_ended, note = len(trials) - len(pending), f"{running} running" if running else ""
        counts = {"done": num_ended, "running": running}
        if pending and self._guided:
            note += ", more points as the search needs them"
        elif pending:
            counts["waiting"] = max(0, len(pending) - running)
            is_timing = pending[0].speed_trial is None  # timing trials are shorter than trainings to the target
            comparable = [trial.outcome for trial in trials if (trial.speed_trial is None) is is_timing]
            if seconds := [outcome.seconds for outcome in comparable if outcome is not None and outcome.seconds]:
                left_s = fmean(seconds) * len(pending) / min(len(pending), self._max_concurrent)
                note += f", about {max(1, round(left_s / 60))} min left"
        self._session.display.trials(num_ended, len(trials), note.removeprefix(", "))
        for state, count in counts.items():
            self._gauge.set(count, {"run": self._session.run_dir.root.name, "state": state})


def trial_line(trial: Trial) -> str:
    """Describe in one line how a trial ended."""
    outcome = trial.outcome or Outcome(status="failed")
    m = outcome.metrics
    numbers = f"{m['images_per_s']:.1f} images/s, {m['epoch_s']:.2f} s/epoch" if "epoch_s" in m else outcome.reason
    again = f", measured {trial.num_measurements} times" if trial.num_measurements > 1 else ""
    point = ", ".join(f"{key}={value}" for key, value in trial.params.items())
    return f"trial {trial.id} ({point}): {outcome.status}  {numbers}{again}"


def save_rows(session: Session, trials: Sequence[Trial]) -> None:
    """Record the current rows of the trials."""
    config = session.experiment.sweep
    rows = rows_of(trials, session.resolved, timing=config.timing_steps is not None)
    session.save(space=config.axes, metric=config.metric, mode=config.mode, trials=rows)
