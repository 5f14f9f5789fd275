"""Which points each group of workers measures: hands out what the planner asks for and writes down the results.

A group of workers takes long to start and a probe is short, so a group that has measured one point goes on to the next as long
as that one reserves the same workers. Ray Tune, the function of each of its trials and the workers talk to one
`SearchCoordinator`, an actor of the sweep; its state is what the sweep's log has of its trials.
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
from service.runs.stages.stage_times import accounted
from service.runs.trial import complete, finished
from service.search.points import identity
from service.search.replay import observation, replay
from service.search.rows import measurements, searched
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


class SearchCoordinator:
    """The points of a sweep, and the groups of workers that are measuring some of them."""

    def __init__(self, result: RunResult, assignments: Mapping[str, Assignment], sweep_dir: str) -> None:
        """`result` is the sweep's as it stands; `assignments` are those of its points, by trial."""
        self._planner = replay(result)
        self._points = searched(result.rows)
        self._ids = {identity(point): trial for trial, point in reversed(self._points.items())}
        self._assignments = dict(assignments)
        self._measured = {row.id: measurements(row) for row in result.rows}
        self._run_dir = RunDir(Path(sweep_dir))
        self._trial_of: dict[str, str] = {}  # worker group → the trial that it measures, or will once its workers have started
        self._running: dict[str, Running] = {}  # by worker group
        self._queued: list[str] = []  # trials that were proposed to a group with other workers

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

    def restart(self, group_id: str, restarts: int) -> None:
        """A group's workers have died, and others start for what it measures: after so many deaths that nobody announced."""
        self._running[group_id].restarts = restarts
        self._running[group_id].starts_began_s.append(time.time())

    def current(self, group_id: str) -> Assignment | None:
        """What a group is measuring; None: it has ended."""
        return self._running[group_id].assignment if group_id in self._running else None

    def should_stop(self, group_id: str, steps_s: Sequence[float]) -> bool:
        """Whether the point that a group is measuring is known well enough."""
        return self._planner.should_stop(steps_s, self._points[self._trial_of[group_id]])

    def next_config(self, group_id: str, result: StageResult) -> dict[str, Any] | None:
        """Take up the result of what a group has measured: the config that it goes on with; None: the group may end.

        Raises:
            OSError: the measurement's outcome could not be written; it is still under way, for `finish` to take up.
        """
        workers = self._assignments[self._trial_of[group_id]].reservation
        self._end(group_id, complete(result))
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
        point = self._planner.ask(None if workers is None else float(workers.num_workers))
        return None if point is None else self._ids[identity(point)]

    def _start(self, group_id: str) -> Running:
        """Begin the next measurement of a group's trial."""
        trial = self._trial_of[group_id]
        assignment = self._measurement(trial)
        begun = event("stage_begun", assignment.name, trial=trial, model=assignment.config.model)
        assignment.log.record([begun])
        self._running[group_id] = Running(assignment, time.time())
        return self._running[group_id]

    def _end(self, group_id: str, outcome: Outcome) -> None:
        """Write down how a group's measurement ended, and only then take it up: what cannot be written is still under way."""
        trial = self._trial_of[group_id]
        running = self._running.get(group_id) or Running(self._measurement(trial), time.time())
        outcome = outcome.model_copy(update={"restarts": running.restarts})
        assignment = running.assignment
        one = accounted(outcome, assignment.events, running.began_s, running.starts_began_s)
        ended = [
            event("stage_ended", assignment.name, trial=trial, outcome={"status": one.status, "reason": one.reason}),
            event("trial_ended", trial=trial, outcome=as_json(one)),
        ]
        assignment.log.record(ended)
        self._measured[trial] = [*self._measured[trial], one]
        del self._trial_of[group_id]
        self._running.pop(group_id, None)
        self._planner.tell(self._points[trial], observation(one))

    def _measurement(self, trial: str) -> Assignment:
        """The trial's next measurement, in a folder of its own: those before it stand, whatever becomes of it."""
        assignment = self._assignments[trial]
        output_dir = str(self._run_dir.trial(trial).measurement(len(self._measured[trial])).root)
        return replace(assignment, config=assignment.config.model_copy(update={"output_dir": output_dir}))
