"""Where a rank's job is: written by its training thread at every phase, read by another thread while that one may be stuck."""

import contextlib
import threading
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeVar

import psutil

from trainables.metrics.phases import BUBBLE, PHASES, RECEIVE
from trainables.stacks import write_stacks_on_signal

T = TypeVar("T")
BETWEEN_STEPS = "between steps"
"""From a step's last phase to the next step's first."""
_FOLLOWING = dict(zip(PHASES, (*PHASES[1:], BETWEEN_STEPS), strict=True)) | {RECEIVE: PHASES[1], BUBBLE: "student"}
_ORDER = ("start", "fill", BETWEEN_STEPS, "other", "eval", "checkpoint", *PHASES, "timing")
"""What ranks do after as many steps, in the order in which they do it."""
_MOVED_BYTES = 2**20


class Position(NamedTuple):
    """Where a rank is in its job."""

    part: str = "start"
    """A phase of a step, `between steps`, another part of `wall_clock`, `start` before the loop, or `fill` of a cache."""
    step: int = 0
    """Steps that are complete."""
    micro_batch: int = 0
    """The one of the step that is under way, from 1 on."""
    quiet_s: float = 0.0
    """Since the last sign of progress."""
    batch_s: float | None = None
    """How long the last step took, or the last batch of what it does instead; None: the first one may compile."""
    age_s: float = 0.0
    """Since the job began on this rank."""
    thread_id: int = 0
    """The training thread's, as `faulthandler` names it."""
    folder: str = ""
    """The stage's; empty where there is none."""

    def __str__(self) -> str:
        if self.part == "start":
            return "start"
        if self.part == BETWEEN_STEPS:
            return f"between steps {self.step} and {self.step + 1}"
        return f"{self.part} of step {self.step + 1}" if self.part in PHASES else f"{self.part} after step {self.step}"

    @property
    def order(self) -> tuple[int, int, int]:
        """Less than that of a rank that is further."""
        return self.step, self.micro_batch, _ORDER.index(self.part)


class Heartbeat:
    """The position of a rank. Its training thread calls what changes it, each a fraction of a microsecond."""

    def __init__(self, folder: str = "") -> None:
        self._folder, self._thread_id = folder, threading.get_ident()
        self._activity = self._part = "start"
        self._step = self._micro_batch = self._bytes_at_beat = 0
        self._began_s = self._beat_s = self._batch_began_s = time.monotonic()
        self._batch_s = dict[str, float]()

    def beat(self) -> None:
        """A sign of progress."""
        self._beat_s = time.monotonic()

    def enter(self, activity: str) -> None:
        """A part of `wall_clock` begins, or goes on."""
        self._activity, self._part = activity, BETWEEN_STEPS if activity == "train" else activity
        self.beat()

    def end_phase(self, phase: str) -> None:
        """A phase of a step is over."""
        self._part = _FOLLOWING[phase]
        self.beat()

    def begin_step(self, step: int) -> None:
        """A step begins, after `step` others; it first waits for its batch."""
        self._step, self._part = step, PHASES[0]
        self._begin_batch()

    def begin_micro_batch(self) -> None:
        """A micro-batch of a step begins, with the teacher's forward."""
        self._part, self._micro_batch = "teacher", self._micro_batch + 1
        self.beat()

    def end_step(self) -> None:
        self._step, self._micro_batch, self._part = self._step + 1, 0, BETWEEN_STEPS
        self._end_batch()

    def over(self, batches: Generator[T, None, None]) -> Generator[T, None, None]:
        """`batches`, each of them a sign of progress. Closes them."""
        with contextlib.closing(batches):
            self._begin_batch()
            for batch in batches:
                self.beat()
                yield batch
                self._end_batch()

    def _begin_batch(self) -> None:
        self.beat()
        self._batch_began_s = self._beat_s

    def _end_batch(self) -> None:
        began_s = self._batch_began_s
        self._begin_batch()
        self._batch_s[self._activity] = self._beat_s - began_s

    def position(self) -> Position:
        """Read by any thread; it may be a beat late."""
        # Before the loop begins, reading and writing is progress: a data set may be copied to the node for hours.
        if self._activity == "start" and (num_bytes := _bytes_moved()) > self._bytes_at_beat + _MOVED_BYTES:
            self._bytes_at_beat = num_bytes
            self.beat()
        now_s, batch_s = time.monotonic(), self._batch_s.get(self._activity)
        quiet_s, age_s = now_s - self._beat_s, now_s - self._began_s
        return Position(self._part, self._step, self._micro_batch, quiet_s, batch_s, age_s, self._thread_id, self._folder)


def _bytes_moved() -> int:
    """What this process has read and written; 0 where that cannot be read, as on macOS."""
    with contextlib.suppress(AttributeError, psutil.Error, OSError):
        counters = psutil.Process().io_counters()
        return counters.read_chars + counters.write_chars
    return 0


_current: Heartbeat | None = None


@contextlib.contextmanager
def watched(folder: str = "") -> Iterator[Heartbeat]:
    """A context in which this process is watched: the heartbeat of the job that runs in it. `folder`: see `Position`."""
    global _current
    write_stacks_on_signal()
    _current = Heartbeat(folder)
    try:
        yield _current
    finally:
        _current = None


def position() -> Position | None:
    """Where this process's job is; None where none is watched. Called by Ray in its main thread."""
    heartbeat = _current
    return None if heartbeat is None else heartbeat.position()
