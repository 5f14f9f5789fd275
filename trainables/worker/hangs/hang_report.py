"""Decide whether a job hangs, and describe where each rank is and which ones the others wait for."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from trainables.failures import EndedError, Failure
from trainables.metrics.heartbeat import Position
from trainables.stacks import ProcessReport

AUTO_S, AUTO_BATCHES = 120.0, 30
"""`hang_after_s: auto` is 30 times the duration of a rank's last step or batch, but at least two minutes."""
ALLOWANCES = {
    "start": 10.0,
    "timing": 10.0,
    "first batch": 10.0,
    "compile or lock": 10.0,
    "checkpoint": 5.0,
    "teacher service": 6.0,
    "other": 1.0,
}
"""Factors on the limit for slow operations: a first batch may compile, a checkpoint waits for a disk, and the client of a teacher
service gives up with a reason after 600 s."""
SILENT_S = 5.0
"""A rank that has not answered for this long counts as not answering."""
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)\n?')
_SLOW_FILES = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/trainables/locks.py")
"""Files in the stack while a model compiles, or while another job holds a lock, for example to copy the data set to the node."""
_WAIT_FILES = ("threading.py", "queue.py", "selectors.py", "connection.py")
"""Files of the standard library in which a thread waits for another; their caller is more informative."""


@dataclass
class Rank:
    """The state of a rank; `process` and `collective` are requested once no rank makes progress."""

    rank: int
    host: str
    position: Position | None
    """Its last answer; None if it runs no job."""
    silent_s: float = 0.0
    """Time since that answer."""
    process: ProcessReport | None = None
    """None if its node did not answer in time."""
    collective: tuple[int, str] | None = None
    """See `last_collective`; None also if the rank did not answer."""

    @property
    def where(self) -> str:
        return str(self.position or "no job")

    @property
    def quiet_s(self) -> float:
        """Time without known progress."""
        return self.silent_s + (self.position.quiet_s if self.position is not None else 0.0)

    @property
    def problem(self) -> str:
        """The problem of a process that neither answers nor writes stacks; empty if there is none."""
        if self.silent_s < SILENT_S or (self.process is not None and self.process.stacks):
            return ""
        return "its node does not answer" if self.process is None else f"its process is {self.process.status}"

    @property
    def is_compiling_or_locked(self) -> bool:
        """Whether its training thread compiles or waits for a lock, which takes long and shows no progress."""
        return any(path.endswith(_SLOW_FILES) for path, _, _ in self._frames())

    @property
    def frame(self) -> str:
        """The innermost informative frame of its training thread: `FILE:LINE in FUNCTION`."""
        if self.process is None:
            return "its stacks did not arrive"
        named = [(Path(path).name, line, function) for path, line, function in self._frames()]
        found = next((frame for frame in named if frame[0] not in _WAIT_FILES), None)
        return "{}:{} in {}".format(*found) if found else ""

    def _frames(self) -> list[tuple[str, str, str]]:
        """The frames of its training thread, innermost first: path, line and function."""
        if self.position is None or self.process is None:
            return []
        _, _, after = self.process.stacks.partition(f"hread 0x{self.position.thread_id:016x}")
        return _FRAME.findall(re.split(r"^(?:Current t|T)hread ", after, maxsplit=1, flags=re.MULTILINE)[0])

    def __str__(self) -> str:
        last = "last collective {1} {0}".format(*self.collective) if self.collective else ""
        parts = [f"rank {self.rank} ({self.host}): {self.where}", self.frame, self.problem, last]
        return ", ".join(filter(None, parts))


def quiet_s(ranks: Iterable[Rank]) -> float:
    """Return how long no rank has made progress: the others may wait for one that does."""
    return min((rank.quiet_s for rank in ranks if rank.position is not None), default=0.0)


def limit_s(
    ranks: Sequence[Rank], hang_after_s: float | Literal["auto"], *, has_service: bool = False, takes_long: bool = False
) -> float:
    """Return how long a job may make no progress: the longest limit of any answering rank's position.

    Args:
        hang_after_s: `scale.hang_after_s`; 0 is no limit.
        has_service: Whether the teacher is a service.
        takes_long: Whether a rank `is_compiling_or_locked`.
    """

    def limit_of(at: Position) -> float:
        auto_s = max(AUTO_S, AUTO_BATCHES * (at.batch_s or 0.0))
        operations = {
            at.part: True,
            "first batch": at.batch_s is None and at.part not in ALLOWANCES,
            "teacher service": has_service and at.part == "teacher",
            "compile or lock": takes_long,
        }
        allowance = max(ALLOWANCES.get(operation, 1.0) for operation, is_running in operations.items() if is_running)
        return allowance * (auto_s if hang_after_s == "auto" else hang_after_s or float("inf"))

    answering = [rank for rank in ranks if rank.silent_s < SILENT_S] or ranks
    return max(limit_of(rank.position or Position("other")) for rank in answering)


def stragglers(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks that the others wait for: at least one, and all if they do not differ."""
    if with_problem := [rank for rank in ranks if rank.problem]:
        return with_problem
    begun = [rank.collective for rank in ranks if rank.collective is not None]
    late = [rank for rank in ranks if rank.collective is not None and rank.collective[0] < max(begun)[0]] or ranks
    orders = [rank.position.order for rank in late if rank.position is not None]
    return [rank for rank in late if rank.position is not None and rank.position.order == min(orders)] or list(late)


def hang_error(ranks: Sequence[Rank]) -> EndedError:
    """Return the error of a job without progress, with the stacks of all ranks."""
    first, *alike = stragglers(ranks)
    others = [rank for rank in ranks if rank is not first and rank not in alike]
    all_hang = bool(alike) and not others and not first.problem
    who = f"all {len(ranks)} ranks" if all_hang else f"rank {first.rank} of {len(ranks)}"
    text = f"no progress for {quiet_s(ranks):.0f} s: {who} {_describe(first, 'hang' if all_hang else 'hangs')}"
    if alike and not all_hang:
        text += f", and so {'does' if len(alike) == 1 else 'do'} {format_ranks(rank.rank for rank in alike)}"
    if others:
        waits = "waits" if len(others) == 1 else "wait"
        text += f"; {format_ranks(rank.rank for rank in others)} {waits} for it in {_waits_in(others)}"
    stacks = (f"{rank}\n{rank.process.stacks if rank.process is not None else ''}" for rank in ranks)
    failure = Failure(
        "hang", text, rank=None if all_hang else first.rank, position=None if all_hang else str(first.position or "start")
    )
    return EndedError(failure, "\n\n".join([text, *stacks]))


def _describe(rank: Rank, verb: str) -> str:
    where = f"in {rank.position}" if rank.position is not None else "before its job"
    if rank.problem:
        return f"on {rank.host} does not answer ({rank.problem}), and last answered {where}"
    return f"{verb} {where}" + (f" ({rank.frame})" if rank.frame else "")


def _waits_in(ranks: Sequence[Rank]) -> str:
    """Return the last collective of most ranks, or their position if there is none."""
    names = ["{1} {0}".format(*rank.collective) for rank in ranks if rank.collective is not None]
    names = names or [str(rank.position) for rank in ranks]
    return max(names, key=names.count)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format as `rank 3` or `ranks 0–2, 5`."""
    numbers = sorted(ranks)
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda indexed: indexed[1] - indexed[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
