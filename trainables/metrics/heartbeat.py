"""Track where a rank's job is: its training thread writes this at every phase, and other threads read it to detect hangs."""

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
"""Order of activities after the same number of steps."""
_MOVED_BYTES = 2**20


class Position(NamedTuple):
    """Where a rank is in its job."""

    part: str = "start"
    """A phase of a step, `between steps`, another part of `wall_clock`, `start` before the loop, or `fill` of a cache."""
    step: int = 0
    """Number of complete steps."""
    micro_batch: int = 0
    """Current micro-batch of the step, from 1."""
    quiet_s: float = 0.0
    """Seconds since the last sign of progress."""
    batch_s: float | None = None
    """Seconds of the last step or batch of the current activity; None during the first one, which may compile."""
    age_s: float = 0.0
    """Seconds since the job began on this rank."""
    thread_id: int = 0
    """The training thread's id, as in `faulthandler`'s output."""
    folder: str = ""
    """The stage's folder, or empty."""

    def __str__(self) -> str:
        if self.part == "start":
            return "start"
        if self.part == BETWEEN_STEPS:
            return f"between steps {self.step} and {self.step + 1}"
        return f"{self.part} of step {self.step + 1}" if self.part in PHASES else f"{self.part} after step {self.step}"

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: ranks that are further along have a larger one."""
        return self.step, self.micro_batch, _ORDER.index(self.part)


class Heartbeat:
    """The position of a rank, updated by its training thread. Each update takes a fraction of a microsecond."""

    def __init__(self, folder: str = "") -> None:
        self._folder, self._thread_id = folder, threading.get_ident()
        self._activity = self._part = "start"
        self._step = self._micro_batch = self._bytes_at_beat = 0
        self._began_s = self._beat_s = self._batch_began_s = time.monotonic()
        self._batch_s = dict[str, float]()

    def beat(self) -> None:
        """Signal progress."""
        self._beat_s = time.monotonic()

    def enter(self, activity: str) -> None:
        """Begin or continue a part of `wall_clock`."""
        self._activity, self._part = activity, BETWEEN_STEPS if activity == "train" else activity
        self.beat()

    def end_phase(self, phase: str) -> None:
        """End a phase of a step."""
        self._part = _FOLLOWING[phase]
        self.beat()

    def begin_step(self, step: int) -> None:
        """Begin the step with index `step`, which first waits for its batch."""
        self._step, self._part = step, PHASES[0]
        self._begin_batch()

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch, which starts with the teacher's forward."""
        self._part, self._micro_batch = "teacher", self._micro_batch + 1
        self.beat()

    def end_step(self) -> None:
        self._step, self._micro_batch, self._part = self._step + 1, 0, BETWEEN_STEPS
        self._end_batch()

    def over(self, batches: Generator[T, None, None]) -> Generator[T, None, None]:
        """Iterate over `batches`, signaling progress with each; close them at the end."""
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
        """Return the position, from any thread; it may be slightly outdated."""
        # Before the loop begins, I/O counts as progress: copying a data set to the node may take hours.
        if self._activity == "start" and (num_bytes := _bytes_moved()) > self._bytes_at_beat + _MOVED_BYTES:
            self._bytes_at_beat = num_bytes
            self.beat()
        now_s, batch_s = time.monotonic(), self._batch_s.get(self._activity)
        quiet_s, age_s = now_s - self._beat_s, now_s - self._began_s
        return Position(self._part, self._step, self._micro_batch, quiet_s, batch_s, age_s, self._thread_id, self._folder)


def _bytes_moved() -> int:
    """Return the bytes that this process has read and written, or 0 if unavailable, as on macOS."""
    with contextlib.suppress(AttributeError, psutil.Error, OSError):
        counters = psutil.Process().io_counters()
        return counters.read_chars + counters.write_chars
    return 0


_current: Heartbeat | None = None


@contextlib.contextmanager
def watched(folder: str = "") -> Iterator[Heartbeat]:
    """A context that sets this process's heartbeat, to be passed to its job. For `folder` see `Position`."""
    global _current
    write_stacks_on_signal()
    _current = Heartbeat(folder)
    try:
        yield _current
    finally:
        _current = None


def position() -> Position | None:
    """Return where this process's job is, or None without a `watched` job. Ray calls this in its main thread."""
    heartbeat = _current
    return None if heartbeat is None else heartbeat.position()
