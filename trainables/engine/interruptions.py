"""Decide, on all ranks at the same step, whether to log, to save a checkpoint, to take the result of an evaluation, or to end the
stage within an epoch.

Clocks and requests differ by rank, so the ranks exchange them at agreed steps, a few seconds apart, and exchange nothing else.
With NCCL an exchange waits for the GPU. Apart from writing the previous log line, nothing else in the loop does.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainables.distributed.group import Group, gather_objects
from trainables.errors import Interruption

EXCHANGE_S = 5.0
"""Seconds between exchanges, so that a request leads to a checkpoint within about ten seconds.

With an evaluation beside training pending, the checkpoint is the one that it evaluates.
"""
LOG_S = 30.0
"""Log a line after this many seconds, even before `train.log_every` steps."""
InterruptionRequest = Callable[[], Interruption | None]
"""Returns why this rank wants the stage to end, or None."""


class Decision(NamedTuple):
    """What all ranks do after a step."""

    logs: bool = False
    saves: bool = False
    interruption: Interruption | None = None
    evaluated: bool = False
    """Whether the pending evaluation has ended."""


@dataclass
class Interruptions:
    """Every rank calls `exchange` between epochs and `after_step` after each step. Only rank 0's clock counts."""

    group: Group
    checkpoint_every_s: float
    request: InterruptionRequest
    clock: Callable[[], float] = time.monotonic
    evaluated: Callable[[], bool] = lambda: False
    """Whether a pending evaluation has ended; only rank 0's counts."""
    _saved_s: float = field(init=False)
    _logged_s: float = field(init=False)
    _exchanged_s: float = field(init=False)
    _exchanged_step: int = 0
    _next_step: int = 0
    _num_steps: int = 1
    """Steps between the last exchange and the next."""

    def __post_init__(self) -> None:
        self._saved_s = self._logged_s = self._exchanged_s = self.clock()

    def saved(self) -> None:
        """Note that a checkpoint was saved."""
        self._saved_s = self.clock()

    def logged(self) -> None:
        """Note that a log line was begun."""
        self._logged_s = self.clock()

    def after_step(self, step: int) -> Decision:
        """Return what all ranks do after `step` steps."""
        return self.exchange(step) if step >= self._next_step else Decision()

    def exchange(self, step: int) -> Decision:
        """Exchange clocks and requests now, and return what all ranks do."""
        now_s = self.clock()
        due = Decision(
            logs=now_s - self._logged_s >= LOG_S,
            saves=now_s - self._saved_s >= self.checkpoint_every_s,
            evaluated=self.evaluated(),
        )
        num_steps = self._steps_until_next(step, now_s)
        ranks = gather_objects((due, num_steps, self.request()), self.group)
        due, self._num_steps, _ = ranks[0]
        self._exchanged_s, self._exchanged_step, self._next_step = now_s, step, step + self._num_steps
        interruption = next((request for *_, request in ranks if request is not None), None)
        return Decision(due.logs, due.saves or interruption is not None, interruption, due.evaluated)

    def _steps_until_next(self, step: int, now_s: float) -> int:
        """Estimate the steps until the next exchange: at most twice as many as last time, as steps may become slower."""
        num_steps = max(step - self._exchanged_step, 1)
        step_s = (now_s - self._exchanged_s) / num_steps
        between_s = min(EXCHANGE_S, self.checkpoint_every_s)
        return max(1, min(2 * self._num_steps, int(between_s / max(step_s, 1e-9))))
