"""Whether a log line or a checkpoint is due inside an epoch, and whether the stage ends there: on all ranks at the same step.

Clocks and notices differ by rank, so ranks exchange them at steps that all of them know, a few seconds apart. Nothing else is
exchanged. With NCCL an exchange waits for the GPU; nothing else in the loop does, but a log line for the one before it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainables.distributed.group import Group, gather_objects
from trainables.errors import Interruption

EXCHANGE_S = 5.0
"""Seconds between two exchanges: with a checkpoint after it a notice is acted on within ten seconds of steps."""
LOG_S = 30.0
"""After so many seconds a line is logged before `train.log_every` steps are over."""
InterruptionRequest = Callable[[], Interruption | None]
"""Why this rank wants the stage to end, where it does."""


class Decision(NamedTuple):
    """What all ranks do after a step."""

    logs: bool = False
    saves: bool = False
    interruption: Interruption | None = None


@dataclass
class Interruptions:
    """Every rank calls `exchange` between epochs and `after_step` after each step. Rank 0's clock is the one that counts."""

    group: Group
    checkpoint_every_s: float
    request: InterruptionRequest
    clock: Callable[[], float] = time.monotonic
    _saved_s: float = field(init=False)
    _logged_s: float = field(init=False)
    _exchanged_s: float = field(init=False)
    _exchanged_step: int = 0
    _next_step: int = 0
    _num_steps: int = 1
    """Between the last exchange and the next one."""

    def __post_init__(self) -> None:
        self._saved_s = self._logged_s = self._exchanged_s = self.clock()

    def saved(self) -> None:
        """A checkpoint was written."""
        self._saved_s = self.clock()

    def logged(self) -> None:
        """A log line was begun."""
        self._logged_s = self.clock()

    def after_step(self, step: int) -> Decision:
        """What all ranks do after this step, the number of steps so far."""
        return self.exchange(step) if step >= self._next_step else Decision()

    def exchange(self, step: int) -> Decision:
        """Exchange clocks and requests now."""
        now_s = self.clock()
        due = Decision(logs=now_s - self._logged_s >= LOG_S, saves=now_s - self._saved_s >= self.checkpoint_every_s)
        num_steps = self._steps_until_next(step, now_s)
        ranks = gather_objects((due, num_steps, self.request()), self.group)
        due, self._num_steps, _ = ranks[0]
        self._exchanged_s, self._exchanged_step, self._next_step = now_s, step, step + self._num_steps
        interruption = next((request for *_, request in ranks if request is not None), None)
        return Decision(due.logs, due.saves or interruption is not None, interruption)

    def _steps_until_next(self, step: int, now_s: float) -> int:
        """As many as take the time between two exchanges, at most twice as many as before: steps may become slower."""
        num_steps = max(step - self._exchanged_step, 1)
        step_s = (now_s - self._exchanged_s) / num_steps
        between_s = min(EXCHANGE_S, self.checkpoint_every_s)
        return max(1, min(2 * self._num_steps, int(between_s / max(step_s, 1e-9))))
