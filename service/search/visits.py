"""Which points each group of workers visits: what the planner asks for is handed out, and what came of it is written down.

A group of workers takes long to start and a probe is short, so a group that has measured one point goes on to the next as long
as the planner's next point has as many workers. Ray Tune, the function of each of its trials and the workers talk to one
`Visits`, an actor of the sweep; its state is the trials' results on disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.config.space import NUM_WORKERS
from service.runs.assignment import Assignment
from service.runs.measurements import combined
from service.runs.outcome import Outcome, write_outcome
from service.runs.result import RunResult
from service.runs.trial import accounted, complete
from service.search.points import identity
from service.search.replay import observation, replay
from service.search.rows import measurements, searched
from trainables.rundir import RunDir
from trainables.stage_result import StageResult


class Visits:
    """The points of a sweep that are left, and the groups of workers that are under way."""

    def __init__(self, result: RunResult, assignments: Mapping[str, Assignment], sweep_dir: str) -> None:
        """`result` is the sweep's `result.json` as it stands; `assignments` are those of its points, by trial."""
        self._planner = replay(result)
        self._points = searched(result.rows)
        self._ids = {identity(point): trial for trial, point in reversed(self._points.items())}
        self._assignments = dict(assignments)
        self._measured = {row.id: measurements(row) for row in result.rows}
        self._under_way: dict[str, Assignment] = {}  # by trial
        self._run_dir = RunDir(Path(sweep_dir))
        self._at: dict[str, str] = {}  # visit → the trial that it is at
        self._began_s: dict[str, float] = {}  # of a trial, unix
        self._shares: set[str] = set()  # trials that paid for no start of their own
        self._queued: list[str] = []  # asked for, by a group that has other workers

    def begin(self, visit: str) -> str | None:
        """The trial that a new group of workers begins with; None: nothing is worth one now."""
        trial = self._queued.pop(0) if self._queued else self._ask(None)
        if trial is not None:
            self._at[visit] = trial
        return trial

    def is_idle(self) -> bool:
        """Whether no group is under way: then nothing will be learned that could make another point worth a probe."""
        return not self._at and not self._queued

    def enter(self, visit: str) -> Assignment:
        """The workers are about to start: what they are to do first."""
        return self._start(self._at[visit])

    def current(self, visit: str) -> Assignment | None:
        """What the visit is at; None: it is over."""
        return self._under_way.get(self._at[visit]) if visit in self._at else None

    def enough(self, visit: str, steps_s: Sequence[float]) -> bool:
        """Whether the point under way is known well enough."""
        return self._planner.enough(steps_s, self._points[self._at[visit]])

    def following(self, visit: str, result: StageResult) -> dict[str, Any] | None:
        """The point under way is measured, `result` is its `stage.json`: what the same workers do next; None: they may go."""
        workers = float(self._points[self._at[visit]][NUM_WORKERS])
        self._end(self._at[visit], complete(result))
        del self._at[visit]
        trial = self._ask(workers)
        if trial is None:
            return None
        if float(self._points[trial][NUM_WORKERS]) != workers:
            self._queued.append(trial)
            return None
        self._at[visit] = trial
        self._shares.add(trial)
        return self._start(trial).config.model_dump(mode="json")

    def leave(self, visit: str, outcome: Outcome) -> None:
        """The group is gone: `outcome` is that of the point that it was at, if it was still at one."""
        if visit in self._at:
            self._end(self._at[visit], outcome)
            del self._at[visit]

    def _start(self, trial: str) -> Assignment:
        """The next measurement of a trial, in a folder of its own: those before it stand, whatever becomes of it."""
        stage = self._run_dir.trial(trial).measurement(len(self._measured[trial]))
        work = self._assignments[trial]
        self._under_way[trial] = replace(work, config=work.config.model_copy(update={"output_dir": str(stage.root)}))
        self._began_s[trial] = time.time()
        return self._under_way[trial]

    def _ask(self, workers: float | None) -> str | None:
        point = self._planner.ask(workers)
        return None if point is None else self._ids[identity(point)]

    def _end(self, trial: str, outcome: Outcome) -> None:
        stage = self._run_dir.trial(trial).measurement(len(self._measured[trial]))
        shares = trial in self._shares and not outcome.restarts
        one = accounted(outcome, stage, self._began_s.pop(trial, time.time()), shares)
        self._measured[trial].append(one)
        self._under_way.pop(trial, None)
        self._shares.discard(trial)
        write_outcome(self._run_dir.trial(trial).result, combined(self._measured[trial]))
        self._planner.tell(self._points[trial], observation(one))
