"""A hang in words: which rank is where, which one the others wait for, and what its threads do. Without Ray."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from trainables.failures import EndedError, Failure
from trainables.metrics.heartbeat import Position
from trainables.worker.hangs.process_probe import ProcessState
from trainables.worker.hangs.worker_probe import Collective

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\n((?:  File .*\n?)*)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LONG = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/trainables/locks.py")
"""Files of what compiles a model, or waits for another job's lock, as while that one copies the data set to the node."""
_WAITING = ("threading.py", "queue.py", "selectors.py", "thread.py")
"""Files of Python's library in which a thread without work waits for some."""
_READING = ("/trainables/data/", "/trainables/device/decoders/")
_WRITING = ("/trainables/engine/checkpoint_writer.py", "/trainables/engine/tensor_file.py", "/trainables/rundir.py")


@dataclass(frozen=True)
class RankReport:
    """All that is known of one rank when no rank goes on."""

    rank: int
    host: str
    position: Position | None
    process: ProcessState | None
    """None: its node did not answer in time."""
    collective: Collective | None = None
    """None: the rank did not answer, or there is none."""
    is_answering: bool = True
    """Whether the worker itself answered lately."""

    @property
    def problem(self) -> str:
        """What is wrong with the process as a whole."""
        if self.process is not None:
            return self.process.state
        return "" if self.is_answering else "is on a node that does not answer"

    @property
    def threads(self) -> dict[int, list[tuple[str, str]]]:
        """Thread → its frames, the innermost first: the file's whole path, and `FILE:LINE in FUNCTION`."""
        return _threads_of(self.process.stacks) if self.process is not None else {}

    @property
    def is_compiling_or_locked(self) -> bool:
        """Whether its training thread does what takes its time, and shows no progress meanwhile."""
        return any(path.endswith(_LONG) for path, _ in self._training_frames())

    @property
    def frame(self) -> str:
        """Where it is in the code: its training thread; where that waits for data or a checkpoint, the thread at work on them."""
        if self.process is None:
            return "its stacks did not arrive"
        frames, position = self._training_frames(), self.position
        threads = list(self.threads.values())
        awaited: tuple[str, ...] = ()
        if position is not None and position.activity == "checkpoint":
            awaited = _WRITING
        elif position is not None and (position.activity, position.phase) == ("train", "data"):
            awaited = _READING
            threads = [*_threads_of(self.process.loader_stacks).values(), *threads]
        frames = next(filter(None, (_at_work(thread, awaited) for thread in threads)), frames)
        return frames[0][1] if frames else ""

    def _training_frames(self) -> list[tuple[str, str]]:
        return self.threads.get(self.position.thread_id, []) if self.position is not None else []

    def __str__(self) -> str:
        parts = [
            f"rank {self.rank} ({self.host}): {self.position or 'no job'}",
            self.frame,
            self.problem,
            self.process.stopped_child if self.process is not None else "",
            "a thread in state D" if self.process is not None and self.process.waits_for_disk else "",
            f"last collective {self.collective.name} {self.collective.number}" if self.collective else "",
            self.process.gpus if self.process is not None else "",
        ]
        return ", ".join(filter(None, parts))


def _threads_of(stacks: str) -> dict[int, list[tuple[str, str]]]:
    return {
        int(thread, 16): [(path, f"{Path(path).name}:{line} in {name}") for path, line, name in _FRAME.findall(frames)]
        for thread, frames in _THREAD.findall(stacks)
    }


def _at_work(frames: list[tuple[str, str]], files: Sequence[str]) -> list[tuple[str, str]]:
    """The frames of a thread from the innermost one in `files` on, where it does not wait for work."""
    if not frames or Path(frames[0][0]).name in _WAITING:
        return []
    ours = next((index for index, (path, _) in enumerate(frames) if any(part in path for part in files)), None)
    return [] if ours is None else frames[ours:]


def stragglers(ranks: Sequence[RankReport]) -> list[RankReport]:
    """The ranks that the others wait for, at least one; all of them, where they do not differ."""
    with_problem = [rank for rank in ranks if rank.problem or (rank.process is not None and rank.process.stopped_child)]
    if with_problem:
        return with_problem
    numbers = [rank.collective.number for rank in ranks if rank.collective is not None]
    late = [rank for rank in ranks if rank.collective is not None and rank.collective.number < max(numbers)]
    candidates = late or ranks
    orders = [rank.position.order for rank in candidates if rank.position is not None]
    return [rank for rank in candidates if rank.position is not None and rank.position.order == min(orders)] or list(candidates)


def hang_error(ranks: Sequence[RankReport], after_s: float) -> EndedError:
    """The failure of a job no rank of which has gone on for `after_s` seconds, with the stacks of all ranks."""
    first, *alike = stragglers(ranks)
    others = [rank for rank in ranks if rank is not first and rank not in alike]
    text = f"rank {first.rank} of {len(ranks)} {describe(first)}"
    if alike:
        text += f", and so {'does' if len(alike) == 1 else 'do'} {numbered(rank.rank for rank in alike)}"
    if others:
        text += f"; {numbered(rank.rank for rank in others)} wait{'s' if len(others) == 1 else ''} for it in {_waits_in(others)}"
    parts = [f"no progress for {after_s:.0f} s: {text}", *map(str, ranks)]
    stacks = "\n\n".join(map(_all_stacks, ranks))
    failure = Failure("hang", parts[0], rank=first.rank, position=str(first.position or "start"))
    return EndedError(failure, "\n".join([*parts, "", stacks]))


def _all_stacks(rank: RankReport) -> str:
    process = rank.process or ProcessState()
    loader = ["its loader process:", process.loader_stacks] if process.loader_stacks else []
    return "\n".join([str(rank), process.stacks, *loader])


def describe(rank: RankReport) -> str:
    position, frame = rank.position, f" ({rank.frame})" if rank.frame else ""
    where = f"in {position}" if position is not None else "before its job"
    if rank.problem:
        return f"on {rank.host} {rank.problem}, and last answered {where}"
    if rank.process is not None and rank.process.waits_for_disk:
        frame += ", where a disk or a network file system does not answer (a thread in state D)"
    if rank.process is not None and rank.process.stopped_child:
        frame += f", and {rank.process.stopped_child}"
    if position is not None and position.activity == "train" and position.phase == "data":
        return f"waits for data {where}{frame}"
    if position is not None and position.activity == "checkpoint":
        return f"does not get its checkpoint written {where}{frame}"
    return f"hangs {where}{frame}"


def _waits_in(ranks: Sequence[RankReport]) -> str:
    """The collective that most ranks have begun last; without one, their position in the job."""
    names = [f"{rank.collective.name} {rank.collective.number}" for rank in ranks if rank.collective is not None]
    names = names or [str(rank.position) for rank in ranks]
    return max(names, key=names.count)


def numbered(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0–2, 5`."""
    numbers = sorted(ranks)
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda indexed: indexed[1] - indexed[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
