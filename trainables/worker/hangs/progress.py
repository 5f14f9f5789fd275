"""Whether a job goes on: what its ranks' positions say over time, without Ray and without a clock of its own."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from trainables.metrics.heartbeat import Position
from trainables.teachers.service.client import RESPONSE_TIMEOUT_S

SHORTEST_S = 120.0
STEPS = 50
"""`auto` waits for so many steady steps, and at least `SHORTEST_S`."""
COLD_FACTOR = 10.0
"""How much longer the start and what may compile may take than a step; with `auto` also a second step than the first one."""
SILENT_S = 5.0
"""A rank that has not answered for so long does not answer."""
CHECKPOINT_FACTOR = 5.0
"""The same of a checkpoint, with `auto` alone: its time is that of a disk and not that of steps."""
SERVICE_S = RESPONSE_TIMEOUT_S + 60.0
"""With `auto` a step may wait for a teacher service at least for so long: its client gives up before, and says why."""


@dataclass
class RankProgress:
    """What is known of one rank."""

    position: Position | None
    """None: no job runs on it."""
    changed_s: float
    """When that last changed."""
    answered_s: float
    """When the rank last answered."""

    def is_answering(self, now_s: float) -> bool:
        return now_s - self.answered_s < SILENT_S


@dataclass
class JobProgress:
    """The ranks' latest positions. `now_s` is the caller's monotonic clock.

    Args:
        hang_after_s: `scale.hang_after_s`; 0: a job never hangs.
        num_ranks: of the job.
        began_s: when the ranks were started.
        has_service: whether the teacher is a service.
    """

    hang_after_s: float | Literal["auto"]
    num_ranks: int
    began_s: float
    has_service: bool = False
    ranks: list[RankProgress] = field(init=False)
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    is_extended: bool = False
    """Set by the caller where the ranks may stay `COLD_FACTOR` times as long where they are; reset when one of them goes on."""
    _last_step: tuple[int, float, bool] | None = None
    """The steps that rank 0 had done when their number last rose, when that was, and whether the next one was warm."""
    _cold_s: float = 0.0
    """The longest of rank 0's steps that were not warm."""

    def __post_init__(self) -> None:
        self.ranks = [RankProgress(Position(), self.began_s, self.began_s) for _ in range(self.num_ranks)]

    def update(self, rank: int, position: Position | None, now_s: float) -> None:
        known = self.ranks[rank]
        same = key_of(position) == key_of(known.position)
        self.ranks[rank] = RankProgress(position, known.changed_s if same else now_s, now_s)
        self.is_extended = self.is_extended and same
        if rank == 0:
            self._time_steps(position, now_s)

    def _time_steps(self, position: Position | None, now_s: float) -> None:
        if position is None or position.activity != "train":
            self._last_step = None
            return
        if self._last_step is not None:
            step, since_s, is_warm = self._last_step
            if position.step == step and position.is_warm == is_warm:
                return
            if position.step > step and is_warm:
                self._steps_s.append((now_s - since_s) / (position.step - step))
            elif not is_warm:
                self._cold_s = max(self._cold_s, now_s - since_s)
        self._last_step = position.step, now_s, position.is_warm

    def is_hung(self, now_s: float) -> bool:
        """Whether every rank with a job has been where it is for longer than it may: one that goes on may be waited for."""
        factor = COLD_FACTOR if self.is_extended else 1.0
        busy = [rank for rank in self.ranks if rank.position is not None]
        # A rank that does not answer is where the others wait for it, and no longer where it answered last.
        answering_s = [self.limit_s(rank.position) for rank in busy if rank.is_answering(now_s)]
        longest_s = max(answering_s, default=float("inf"))
        return bool(busy) and all(now_s - rank.changed_s > factor * min(self.limit_s(rank.position), longest_s) for rank in busy)

    def limit_s(self, position: Position | None) -> float:
        """How long a rank may stay at a position."""
        auto = self.hang_after_s == "auto"
        steps_s = STEPS * median(self._steps_s) if self._steps_s else COLD_FACTOR * self._cold_s
        base_s = max(SHORTEST_S, steps_s) if self.hang_after_s == "auto" else self.hang_after_s
        if position is None or not base_s:
            return float("inf")
        if auto and position.activity == "checkpoint":
            return CHECKPOINT_FACTOR * base_s
        limit_s = base_s if position.is_warm else COLD_FACTOR * base_s
        waits_for_service = self.has_service and (position.activity, position.phase) == ("train", "teacher")
        return max(limit_s, SERVICE_S) if auto and waits_for_service else limit_s

    def longest_s(self, now_s: float) -> float:
        """For how long no rank has gone on."""
        return min((now_s - rank.changed_s for rank in self.ranks if rank.position is not None), default=0.0)

    def age_s(self, now_s: float) -> float:
        """For how long the job has been running, by the rank that began it first."""
        ages_s = (rank.position.age_s + now_s - rank.answered_s for rank in self.ranks if rank.position is not None)
        return max(ages_s, default=0.0)


def key_of(position: Position | None) -> tuple[str, int] | None:
    """Two positions are the same where nothing has happened in between."""
    return None if position is None else (position.folder, position.num_beats)
