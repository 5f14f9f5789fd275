"""Which points each group of workers measures: hands out what the planner asks for and writes down the results.

A group of workers takes long to start and a probe is short, so a group that has measured one point goes on to the next as long
as the planner's next point has as many workers. Ray Tune, the function of each of its trials and the workers talk to one
`SearchCoordinator`, an actor of the sweep; its state is the trials' results on disk.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.config.space import NUM_WORKERS
from service.runs.measurements import combined
from service.runs.outcome import Outcome, write_outcome
from service.runs.result import RunResult
from service.runs.stages.assignment import Assignment
from service.runs.stages.stage_times import accounted
from service.runs.trial import complete
from service.search.points import identity
from service.search.replay import observation, replay
from service.search.rows import measurements, searched
from trainables.rundir import RunDir
from trainables.stage_result import StageResult


class SearchCoordinator:
    """The points of a sweep, and the groups of workers that are measuring some of them."""

    def __init__(self, result: RunResult, assignments: Mapping[str, Assignment], sweep_dir: str) -> None:
        """`result` is the sweep's `result.json` as it stands; `assignments` are those of its points, by trial."""
        self._planner = replay(result)
        self._points = searched(result.rows)
        self._ids = {identity(point): trial for trial, point in reversed(self._points.items())}
        self._assignments = dict(assignments)
        self._measured = {row.id: measurements(row) for row in result.rows}
        self._running: dict[str, Assignment] = {}  # by trial
        self._run_dir = RunDir(Path(sweep_dir))
        self._trial_of: dict[str, str] = {}  # worker group → the trial that it measures
        self._began_s: dict[str, float] = {}  # of a trial, unix
        self._reusing: set[str] = set()  # trials on workers that were there already
        self._queued: list[str] = []  # proposed to a group with another number of workers

    def suggest(self, group_id: str) -> str | None:
        """The trial that a new group of workers begins with; None: nothing is worth one now."""
        trial = self._queued.pop(0) if self._queued else self._ask(None)
        if trial is not None:
            self._trial_of[group_id] = trial
        return trial

    def is_idle(self) -> bool:
        """Whether no group is running: then nothing will be learned that could make another point worth a probe."""
        return not self._trial_of and not self._queued

    def start(self, group_id: str) -> Assignment:
        """What a group that is about to start measures first."""
        return self._start(self._trial_of[group_id])

    def current(self, group_id: str) -> Assignment | None:
        """What a group is measuring; None: it has ended."""
        return self._running.get(self._trial_of[group_id]) if group_id in self._trial_of else None

    def should_stop(self, group_id: str, steps_s: Sequence[float]) -> bool:
        """Whether the point that a group is measuring is known well enough."""
        return self._planner.should_stop(steps_s, self._points[self._trial_of[group_id]])

    def next_config(self, group_id: str, result: StageResult) -> dict[str, Any] | None:
        """Take up the `stage.json` of what a group has measured: the config that it goes on with; None: the group may end."""
        workers = float(self._points[self._trial_of[group_id]][NUM_WORKERS])
        self._end(self._trial_of[group_id], complete(result))
        del self._trial_of[group_id]
        trial = self._ask(workers)
        if trial is None:
            return None
        if float(self._points[trial][NUM_WORKERS]) != workers:
            self._queued.append(trial)
            return None
        self._trial_of[group_id] = trial
        self._reusing.add(trial)
        return self._start(trial).config.model_dump(mode="json")

    def finish(self, group_id: str, outcome: Outcome) -> None:
        """A group has ended: `outcome` is that of the point that it was measuring, if there was one."""
        if group_id in self._trial_of:
            self._end(self._trial_of[group_id], outcome)
            del self._trial_of[group_id]

    def _start(self, trial: str) -> Assignment:
        """The next measurement of a trial, in a folder of its own: those before it stand, whatever becomes of it."""
        stage = self._run_dir.trial(trial).measurement(len(self._measured[trial]))
        work = self._assignments[trial]
        self._running[trial] = replace(work, config=work.config.model_copy(update={"output_dir": str(stage.root)}))
        self._began_s[trial] = time.time()
        return self._running[trial]

    def _ask(self, workers: float | None) -> str | None:
        point = self._planner.ask(workers)
        return None if point is None else self._ids[identity(point)]

    def _end(self, trial: str, outcome: Outcome) -> None:
        stage = self._run_dir.trial(trial).measurement(len(self._measured[trial]))
        shares = trial in self._reusing and not outcome.restarts
        one = accounted(outcome, stage, self._began_s.pop(trial, time.time()), shares)
        self._measured[trial].append(one)
        self._running.pop(trial, None)
        self._reusing.discard(trial)
        write_outcome(self._run_dir.trial(trial).result, combined(self._measured[trial]))
        self._planner.tell(self._points[trial], observation(one))
