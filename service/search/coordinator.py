"""Which points each group of workers measures: hands them out and writes down the results.

A group of workers takes long to start and a point is short, so a group that has measured one goes on to the next as long as that
one reserves the same workers. Ray Tune, the function of each of its trials and the workers talk to one `PointCoordinator`, an
actor of the sweep; its state is what the sweep's log has of its trials.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from service.cluster.resources import Reservation
from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.result import RunResult
from service.runs.run_log import as_json
from service.runs.stages.assignment import Assignment
from service.runs.stages.stage_times import with_session_times
from service.runs.trial import begin_stage, complete, finished, refused_with, remove_leftovers
from service.search.points import identity
from service.search.replay import observation, replay
from service.search.rows import searched
from trainables.rundir import RunDir
from trainables.stage_result import StageResult


@dataclass
class Running:
    """A measurement that is under way. All times are unix."""

    assignment: Assignment
    began_s: float
    starts_began_s: list[float] = field(default_factory=list)
    """When workers were started for it; none where they were there already."""
    restarts: int = 0
    has_other_workers: bool = False
    """Whether those that it began with have died."""


class PointCoordinator:
    """The points of a sweep, and the groups of workers that are measuring some of them."""

    def __init__(self, assignments: Mapping[str, Assignment], sweep_dir: str, guided: RunResult | None = None) -> None:
        """`assignments` are those of the points, by trial: each is measured once, in order.

        In a `guided` sweep, of which this is the result as it stands, those are that the planner asks for, as often as it does.
        """
        self._planner = None if guided is None else replay(guided)
        self._points = {} if guided is None else searched(guided.rows)
        self._ids = {identity(point): trial for trial, point in reversed(self._points.items())}
        self._assignments = dict(assignments)
        self._run_dir = RunDir(Path(sweep_dir))
        self._trial_of: dict[str, str] = {}  # worker group → the trial that it measures, or will once its workers have started
        self._running: dict[str, Running] = {}  # by worker group
        # Trials that wait for workers: all, or those that the planner has proposed to a group with others.
        self._queued = [] if self._planner is not None else list(assignments)

    def suggest(self, group_id: str) -> str | None:
        """The trial that a new group of workers begins with; None: nothing is worth one now."""
        trial = self._next(None)
        if trial is not None:
            self._trial_of[group_id] = trial
        return trial

    def is_idle(self) -> bool:
        """Whether no group is running: then nothing will be learned that could make another point worth a probe."""
        return not self._trial_of and not self._queued

    def start(self, group_id: str) -> Assignment:
        """What a group that is about to start measures first."""
        running = self._start(group_id)
        running.starts_began_s.append(running.began_s)
        return running.assignment

    def restart(self, group_id: str, restarts: int) -> float:
        """A group's workers have died, and others start for what it measures: after so many deaths that nobody announced.

        Returns the seconds that the measurement has taken.
        """
        running, now_s = self._running[group_id], time.time()
        running.restarts, running.has_other_workers = restarts, True
        running.starts_began_s.append(now_s)
        return now_s - running.began_s

    def current(self, group_id: str) -> Assignment | None:
        """What a group is measuring; None: it has ended."""
        return self._running[group_id].assignment if group_id in self._running else None

    def should_stop(self, group_id: str, steps_s: Sequence[float]) -> bool:
        """Whether the point that a group is measuring is known well enough."""
        assert self._planner is not None
        return self._planner.should_stop(steps_s, self._points[self._trial_of[group_id]])

    def next_config(self, group_id: str, result: StageResult) -> dict[str, Any] | None:
        """Take up the result of what a group has measured: the config that it goes on with; None: the group may end.

        Raises:
            OSError: the measurement's outcome could not be written; it is still under way, for `finish` to take up.
        """
        workers, running = self._assignments[self._trial_of[group_id]].reservation, self._running[group_id]
        self._end(group_id, complete(result))
        if running.has_other_workers and running.assignment.limit_s is not None:
            return None  # they have what was left of that point's time
        trial = self._next(workers)
        if trial is None:
            return None
        if self._assignments[trial].reservation != workers:
            self._queued.append(trial)
            return None
        self._trial_of[group_id] = trial
        return self._start(group_id).assignment.config.model_dump(mode="json")

    def finish(self, group_id: str, outcome: Outcome) -> None:
        """A group has ended: `outcome` is that of the point that it was measuring, if there was one.

        What was measured to its end is `ok`, whatever its workers died of afterwards.
        """
        if group_id in self._trial_of:
            current = self.current(group_id)
            self._end(group_id, (finished(current) if current is not None else None) or outcome)

    def _next(self, workers: Reservation | None) -> str | None:
        """What such workers, where they are there, measure next: a trial that waits for them, or what the planner asks for."""
        for trial in self._queued:
            if workers is None or self._assignments[trial].reservation == workers:
                self._queued.remove(trial)
                return trial
        if self._planner is None:
            return None
        point = self._planner.ask(None if workers is None else float(workers.num_workers))
        return None if point is None else self._ids[identity(point)]

    def _start(self, group_id: str) -> Running:
        """Begin the next measurement of a group's trial, in a folder of its own: those before it stand."""
        trial = self._trial_of[group_id]
        assignment = self._assignments[trial]
        number = len(assignment.log.of(f"trials/{trial}"))
        output_dir = str(self._run_dir.trial(trial).measurement(number).root)
        assignment = replace(assignment, config=assignment.config.model_copy(update={"output_dir": output_dir}))
        remove_leftovers(assignment.stage_dir)
        begin_stage(trial, assignment)
        self._running[group_id] = Running(assignment, time.time())
        return self._running[group_id]

    def _end(self, group_id: str, outcome: Outcome) -> None:
        """Write down how a group's measurement ended, and only then take it up: what cannot be written is still under way."""
        trial = self._trial_of[group_id]
        running = self._running.get(group_id) or self._start(group_id)
        outcome = outcome.model_copy(update={"restarts": running.restarts})
        assignment = running.assignment
        one = with_session_times(outcome, assignment.events, running.starts_began_s)
        waiting = {other: self._assignments[other] for other in self._queued}
        outcomes = {trial: one} | refused_with(trial, one, assignment, waiting)
        assignment.log.record([event("trial_ended", trial=each, outcome=as_json(outcome)) for each, outcome in outcomes.items()])
        del self._trial_of[group_id]
        self._running.pop(group_id, None)
        self._queued = [other for other in self._queued if other not in outcomes]
        if self._planner is not None:
            for each, outcome in outcomes.items():
                self._planner.tell(self._points[each], observation(outcome))
