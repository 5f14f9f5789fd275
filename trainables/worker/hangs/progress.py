"""Whether a job makes progress: what its ranks' positions say over time, without Ray and without a clock of its own."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainables.metrics.heartbeat import Position

AUTO_S, AUTO_BATCHES = 120.0, 30
"""`auto`: thirty times as long as a rank's last step or batch took, at least two minutes."""
ALLOWANCES = {
    "start": 10.0,
    "timing": 10.0,
    "first batch": 10.0,
    "compile or lock": 10.0,
    "checkpoint": 5.0,
    "teacher service": 6.0,
}
"""How many times as long an operation may take: a first batch may compile; a checkpoint's time is that of a disk; the client of
a teacher service gives up after 600 s, and says why."""
SILENT_S = 5.0
"""A rank that has not answered for so long does not answer."""


class RankProgress(NamedTuple):
    """The last answer of a rank (None: no job runs on it), when that last changed, and when it last answered."""

    position: Position | None
    changed_s: float
    answered_s: float

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
    is_compiling_or_locked: bool = False
    """Set by the caller, who sees the stacks; reset when a rank goes on."""

    def __post_init__(self) -> None:
        self.ranks = [RankProgress(Position(), self.began_s, self.began_s) for _ in range(self.num_ranks)]

    def update(self, rank: int, position: Position | None, now_s: float) -> None:
        known = self.ranks[rank]
        same = _key(position) == _key(known.position)
        self.ranks[rank] = RankProgress(position, known.changed_s if same else now_s, now_s)
        self.is_compiling_or_locked = self.is_compiling_or_locked and same

    def quiet_s(self, now_s: float) -> float:
        """For how long no rank has gone on: one that goes on may be waited for."""
        return min((now_s - rank.changed_s for rank in self.ranks if rank.position is not None), default=0.0)

    def is_hung(self, now_s: float) -> bool:
        """Whether no rank has gone on for as long as any that answers may stay where it is."""
        answering = [rank for rank in self.ranks if rank.is_answering(now_s)] or self.ranks
        limits_s = [self.limit_s(rank.position) for rank in answering if rank.position is not None]
        return self.quiet_s(now_s) > max(limits_s, default=self.limit_s(Position("other")))

    def limit_s(self, position: Position) -> float:
        """How long a rank may stay at a position."""
        if self.hang_after_s == "auto":
            base_s = max(AUTO_S, AUTO_BATCHES * (position.batch_s or 0.0))
        else:
            base_s = self.hang_after_s or float("inf")
        operations = {
            position.activity: True,
            "first batch": position.activity in ("train", "eval", "fill") and position.batch_s is None,
            "teacher service": self.has_service and (position.activity, position.phase) == ("train", "teacher"),
            "compile or lock": self.is_compiling_or_locked,
        }
        return base_s * max(ALLOWANCES.get(operation, 1.0) for operation, is_under_way in operations.items() if is_under_way)


def _key(position: Position | None) -> tuple[str, int] | None:
    """Two positions are the same where nothing has happened in between."""
    return None if position is None else (position.folder, position.num_beats)
