"""Trials handed to Ray Tune, watched while it runs them, and recorded as each ends."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from service.cluster.resources import Cluster
from service.config.sweep import ACCURACIES
from service.runs.outcome import Outcome, write_outcome
from service.runs.plan import Plan
from service.runs.result import TrialRow
from service.runs.session import Session, start_tracking
from service.runs.stages.assignment import Assignment
from service.runs.stages.stage_times import end_session
from service.runs.stored.stored_runs import discard
from service.sweeps.trial_records import TrialRecords
from service.sweeps.trials import Trial, load_outcomes, rows_of
from service.sweeps.tune import SessionEnding, search_trials, tune_trials, with_shared_starts
from trainables.errors import ExperimentError
from trainables.paced import Paced
from trainables.rundir import OLD_FILE_S, StageDir, write_text

TRIALS_GAUGE = ("raydistill_trials", "trials of a sweep that are done, running or waiting")
"""A gauge and what it is, as `trainables.worker.reporter.GAUGES`; its label `state` is one of these."""


@dataclass(frozen=True)
class TeacherSource:
    """Where the students' teacher is: its weights, and the names of the actors of `teacher.service`."""

    weights: str | None
    actors: tuple[str, ...]


def run_pending(
    session: Session, records: TrialRecords, trials: list[Trial], pending: list[Trial], cluster: Cluster, teacher: TeacherSource
) -> None:
    """Hand the pending ones of the trials to Ray Tune and record each as it ends; a guided search may measure any point again."""
    guided = session.experiment.sweep.policy == "guided" and not any(trial.speed_trial for trial in pending)
    candidates = [trial for trial in trials if not trial.speed_trial] if guided else pending
    assignments = assign(session, candidates, cluster, teacher, guided=guided)
    save_rows(session, trials)
    if not assignments:
        return
    if guided:
        assignments = with_shared_starts(assignments)
        search = partial(search_trials, session.result)
    else:
        search = partial(tune_trials, session.experiment.sweep)
    max_concurrent, session_ending = concurrency(session, assignments, cluster), SessionEnding()
    watch = TrialWatch(session, records, trials, {} if guided else assignments, max_concurrent)
    try:
        session.wait_for(lambda: search(assignments, session.run_dir, max_concurrent, session_ending), watch.tick)
        watch.look()
        if not guided:
            watch.wait_for_results([trial for trial in pending if trial.id in assignments])
    except BaseException:  # as of Ctrl-C: the processes of trials are killed, and cannot say that they end
        session_ending.set()
        watch.end_sessions(pending)
        with contextlib.suppress(OSError, ExperimentError):  # as of a full disk: what ended the sweep matters more
            load_outcomes(trials, session.run_dir)
            save_rows(session, trials)
        raise
    save_rows(session, trials)


def assign(
    session: Session, trials: Sequence[Trial], cluster: Cluster, teacher: TeacherSource, *, guided: bool
) -> dict[str, Assignment]:
    """The student's stage of each trial that can run, by trial; its experiment is written to its folder."""
    assignments = {}
    for trial in trials:
        if trial.resolved is None or (trial.outcome is not None and trial.outcome.status == "infeasible"):
            continue
        run_dir = session.run_dir.trial(trial.id)
        if guided:  # what a kill left of a measurement is of no use, and would look as if it had been begun again
            discard(run_dir.measurement(trial.num_measurements))
        if trial.outcome is None:
            write_text(run_dir.experiment, trial.resolved.to_yaml())
        plan = Plan.on(trial.resolved.experiment, cluster, session.result.accepted_data)
        labels = {"run": session.run_dir.root.name, "trial": trial.id}
        assignment = plan.assign("student", run_dir, labels, teacher.weights, teacher.actors, session.run_dir)
        assignments[trial.id] = replace(assignment, limit_s=session.experiment.sweep.trial_limit_s)
    return assignments


def concurrency(session: Session, assignments: Mapping[str, Assignment], cluster: Cluster) -> int:
    """How many trials may run at a time; of those that are compared by speed so few that none slows down another."""
    config, reservations = session.experiment.sweep, [assignment.reservation for assignment in assignments.values()]
    count = min(cluster.max_concurrent(reservation, config.max_concurrent) for reservation in reservations)
    apart, shared = count, "teacher.service"
    if config.metric not in ACCURACIES:
        if any(reservation.service for reservation in reservations):
            apart = 1
        elif cluster.real_cpus is not None:
            apart = max(1, cluster.real_cpus // max(reservation.total_cpus for reservation in reservations))
            shared = f"this machine's {cluster.real_cpus} cores"
    if apart < count:
        session.display.print(f"{apart} trial{'s' if apart > 1 else ''} at a time, not {count}: more would share {shared}")
    return min(apart, count)


class TrialWatch:
    """Sees trials begin and end while Ray Tune runs them, by their files; `tick` is called a few times a second.

    Looking at the files of thousands of trials takes long, and so does writing their rows: each is done so seldom that it takes
    at most a tenth of the time.
    """

    def __init__(
        self,
        session: Session,
        records: TrialRecords,
        trials: list[Trial],
        assignments: Mapping[str, Assignment],
        max_concurrent: int,
    ) -> None:
        """`assignments` are those of the trials that are refused where one that needs no more has waited for nodes in vain."""
        from ray.util.metrics import Gauge

        name, text = TRIALS_GAUGE
        self._gauge = Gauge(name, description=text, tag_keys=("run", "state"))
        self._max_concurrent = max_concurrent
        self._session, self._records, self._trials, self._assignments = session, records, trials, assignments
        self._began_s = time.time()
        self._begun: set[StageDir] = set()
        self._loaded_ns = {trial.id: changed_ns(self._result_of(trial)) for trial in trials}
        self._unsaved = False
        self._look, self._save = Paced(self.look), Paced(self.save)

    def tick(self) -> None:
        """Show and record what has changed, unless it is too early to look again."""
        self._look()
        if self._unsaved:
            self._save()

    def look(self) -> None:
        """Show and record which measurements have begun and which trials have a new result."""
        start_tracking(self._session)
        running = 0
        for trial in self._trials:
            measured = self._session.run_dir.trial(trial.id).measurement(trial.num_measurements)
            written_ns = changed_ns(self._result_of(trial))
            has_ended = written_ns != self._loaded_ns[trial.id]
            for stage in (measured.init, measured) if measured not in self._begun else ():
                if stage not in self._begun and (stage.root.exists() or (has_ended and stage == measured)):
                    self._begun.add(stage)
                    self._records.begin(trial, stage)
                    self._session.display.follow(trial.id, stage)
            running += not has_ended and not self._begun.isdisjoint((measured.init, measured))
            if has_ended:
                self._loaded_ns[trial.id] = written_ns
                load_outcomes([trial], self._session.run_dir)
                self._records.end(trial)
                self._unsaved = True
                self._refuse_as_large(trial)
        self._show(min(running, self._max_concurrent))  # what a kill left of a trial looks as if it ran

    def _show(self, running: int) -> None:
        """How far the sweep is. How many points a guided search measures nobody knows before it ends."""
        pending = [trial for trial in self._trials if trial.outcome is None]
        num_ended, note = len(self._trials) - len(pending), f"{running} running" if running else ""
        counts = {"done": num_ended, "running": running}
        if pending and not self._assignments:  # a guided search
            note += ", as many more as the search asks for"
        elif pending:
            counts["waiting"] = max(0, len(pending) - running)
            is_timing = pending[0].speed_trial is None  # a training to the target takes longer than the trials that timed steps
            alike = [trial.outcome for trial in self._trials if (trial.speed_trial is None) is is_timing]
            if seconds := [outcome.seconds for outcome in alike if outcome is not None and outcome.seconds]:
                left_s = fmean(seconds) * len(pending) / min(len(pending), self._max_concurrent)
                note += f", about {rounded_time(left_s)} left"
        self._session.display.trials(num_ended, len(self._trials), note.removeprefix(", "))
        for state, count in counts.items():
            self._gauge.set(count, {"run": self._session.run_dir.root.name, "state": state})

    def wait_for_results(self, trials: Sequence[Trial]) -> None:
        """Wait for the results of trials that have ended: a file server may hide for a while what their node has written."""
        until_s = time.monotonic() + OLD_FILE_S
        if missing := [trial.id for trial in trials if trial.outcome is None]:
            self._session.display.print(f"waiting for the results of {len(missing)} trials")
        while any(trial.outcome is None for trial in trials) and time.monotonic() < until_s:
            time.sleep(1)
            self.look()

    def save(self) -> None:
        """Write the rows as they stand."""
        self._unsaved = False
        save_rows(self._session, self._trials)

    def _refuse_as_large(self, waited: Trial) -> None:
        """Where a trial waited for nodes in vain, refuse those that need as much and have not begun: one such wait is enough."""
        if waited.outcome is None or waited.outcome.failure != "unschedulable" or waited.id not in self._assignments:
            return
        reservation = self._assignments[waited.id].reservation
        for trial in self._trials:
            stage = self._session.run_dir.trial(trial.id).measurement(0)
            if trial.outcome is not None or trial.id not in self._assignments:
                continue
            if stage.root.exists() or stage.init.root.exists():
                continue
            if self._assignments[trial.id].reservation.is_as_large_as(reservation):
                reason = f"it needs as much as trial {waited.id}, and {waited.outcome.reason}"
                outcome = Outcome(status="failed", failure="unschedulable", reason=reason)
                write_outcome(self._result_of(trial), outcome)  # the trial sees it, and does not begin
                trial.outcome = outcome
                self._loaded_ns[trial.id] = changed_ns(self._result_of(trial))
                self._records.begin(trial)
                self._records.end(trial)

    def end_sessions(self, pending: Sequence[Trial]) -> None:
        """Note that the work on trials ends that this session has begun and that have not ended."""
        for trial in pending:
            if not self._result_of(trial).exists():
                stage = self._session.run_dir.trial(trial.id).measurement(0)
                end_session(stage if stage.root.exists() else stage.init, self._began_s)

    def _result_of(self, trial: Trial) -> Path:
        return self._session.run_dir.trial(trial.id).result


def rounded_time(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def changed_ns(path: Path) -> int:
    """When a file was last written; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def best_trial(rows: Sequence[TrialRow], metric: str, mode: str) -> TrialRow | None:
    """The complete trial with the best metric; None where no complete trial has it."""
    complete = [row for row in rows if row.status == "ok" and row.metrics.get(metric) is not None]
    if not complete:
        return None
    pick: Callable[..., TrialRow] = max if mode == "max" else min
    return pick(complete, key=lambda row: row.metrics[metric])


def save_rows(session: Session, trials: Sequence[Trial]) -> None:
    """Write the rows as they stand."""
    config = session.experiment.sweep
    rows = rows_of(trials, session.resolved, timing=config.timing_steps is not None)
    best = best_trial(rows, config.figure, config.mode)
    session.save(space=config.axes, metric=config.metric, mode=config.mode, trials=rows, best=best)
