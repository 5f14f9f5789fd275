"""Where a rank's job is: written by its training thread at every phase, read by another thread while that one may be stuck."""

import contextlib
import threading
import time
from collections.abc import Generator
from typing import NamedTuple, TypeVar

from trainables.metrics.phases import BUBBLE, PHASES, RECEIVE

T = TypeVar("T")
BETWEEN_STEPS = "log"
"""From a step's last phase to the next step's first."""
_FOLLOWING = dict(zip(PHASES, (*PHASES[1:], BETWEEN_STEPS), strict=True)) | {RECEIVE: PHASES[1], BUBBLE: "student"}
_ORDER = ("start", "fill", BETWEEN_STEPS, "other", "eval", "checkpoint", "train", "timing")
"""What ranks do after as many steps, in the order in which they do it."""


class Position(NamedTuple):
    """Where a rank is in its job."""

    activity: str = "start"
    """A part of `wall_clock`, or `start` before the loop, or `fill` of a teacher's cache."""
    step: int = 0
    """Steps that are complete."""
    phase: str = ""
    """Of a step, where the activity is `train`."""
    num_beats: int = 0
    """It rises with every sign of progress."""
    batch_s: float | None = None
    """How long the activity's last step or batch took; None: none is complete, and the first may compile."""
    age_s: float = 0.0
    """Since the job began on this rank."""
    thread_id: int = 0
    """Of the training thread, as `faulthandler` names it."""
    folder: str = ""
    """The stage's; empty where there is none."""
    micro_batch: int = 0
    """Of a step, where the activity is `train`."""

    def __str__(self) -> str:
        if self.activity == "train" and self.phase != BETWEEN_STEPS:
            return f"{self.phase} of step {self.step + 1}"
        if self.activity == "start":
            return "start"
        name = BETWEEN_STEPS if self.activity == "train" else self.activity
        return f"{name} after step {self.step}"

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Less than that of a rank that is further."""
        between = self.activity == "train" and self.phase == BETWEEN_STEPS
        phase = PHASES.index(self.phase) if self.phase in PHASES else 0
        return self.step, _ORDER.index(BETWEEN_STEPS if between else self.activity), self.micro_batch, phase


class Heartbeat:
    """The position of a rank. Its training thread calls what changes it, each a fraction of a microsecond."""

    def __init__(self, folder: str = "") -> None:
        self._folder, self._began_s, self._thread_id = folder, time.monotonic(), threading.get_ident()
        self._activity, self._phase, self._step = "start", "", 0
        self._num_beats = self._micro_batch = 0
        self._batch_began_s, self._batch_s = self._began_s, dict[str, float]()

    def enter(self, activity: str) -> None:
        """An activity begins, or goes on."""
        self._activity = activity
        self._num_beats += 1

    def end_phase(self, phase: str) -> None:
        """A phase of a step is over."""
        self._phase = _FOLLOWING[phase]
        self._num_beats += 1

    def begin_step(self, step: int) -> None:
        """A step begins, after `step` others; it first waits for its batch."""
        self._step, self._phase, self._micro_batch = step, PHASES[0], 0
        self.beat()

    def begin_micro_batch(self) -> None:
        """A micro-batch of a step begins, with the teacher's forward."""
        self._phase = "teacher"
        self._micro_batch += 1
        self._num_beats += 1

    def end_step(self) -> None:
        self._step, self._phase = self._step + 1, BETWEEN_STEPS
        self._end_batch()

    def beat(self) -> None:
        """A step or a batch of the activity begins."""
        self._batch_began_s = time.monotonic()
        self._num_beats += 1

    def _end_batch(self) -> None:
        began_s, self._batch_began_s = self._batch_began_s, time.monotonic()
        self._batch_s[self._activity] = self._batch_began_s - began_s
        self._num_beats += 1

    def over(self, batches: Generator[T, None, None]) -> Generator[T, None, None]:
        """`batches`, each of them a sign of progress. Closes them."""
        with contextlib.closing(batches):
            self.beat()
            for batch in batches:
                self._num_beats += 1
                yield batch
                self._end_batch()

    def position(self) -> Position:
        """Read by any thread; it may be a beat late."""
        return Position(
            activity := self._activity,
            self._step,
            self._phase,
            self._num_beats,
            self._batch_s.get(activity),
            time.monotonic() - self._began_s,
            self._thread_id,
            self._folder,
            self._micro_batch,
        )
