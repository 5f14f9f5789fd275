"""Choose where to cut a model: minimize the time of the slowest stage, within the memory of the devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainables.distributed.pipeline.block_costs import Block
from trainables.errors import ModelError

MAX_MEMORY_FRACTION = 0.9
"""The fraction of a device's memory that a cut may fill. The rest is for temporary tensors, including the teacher's."""


@dataclass(frozen=True)
class StageCosts:
    """The costs of consecutive blocks as pipeline stages."""

    blocks: Sequence[Block]
    num_stages: int
    num_micro_batches: int
    schedule: str
    parameter_copies: float
    """Memory of a parameter with its gradient and optimizer state, as a multiple of the parameter."""
    memory_bytes: float = math.inf
    """Memory of one device."""
    teacher_s: float = 0.0
    """The teacher's forward time for one micro-batch, on the last stage."""
    teacher_bytes: float = 0.0

    @cached_property
    def _sums(self) -> NDArray[np.float64]:
        """Cumulative seconds, parameter bytes and activation bytes of the blocks, starting with zeros."""
        costs = [(each.forward_s + each.backward_s, each.parameter_bytes, each.activation_bytes) for each in self.blocks]
        return np.cumsum([(0.0, 0.0, 0.0), *costs], axis=0)

    def stage_s(self, stage: int, first: int, end: int) -> float:
        """Return a stage's seconds per micro-batch, for blocks [first, end); inf if it trains nothing or does not fit."""
        passes_s, parameter_bytes, activation_bytes = (self._sums[end] - self._sums[first]).tolist()
        # GPipe stores all micro-batches. Fewer micro-batches than stages run as GPipe, since torch's 1F1B refuses them.
        is_gpipe, is_last = self.schedule == "gpipe" or self.num_micro_batches < self.num_stages, stage == self.num_stages - 1
        num_stored = self.num_micro_batches if is_gpipe else self.num_stages - stage
        needed_bytes = self.parameter_copies * parameter_bytes + num_stored * activation_bytes + is_last * self.teacher_bytes
        fits = parameter_bytes and needed_bytes <= MAX_MEMORY_FRACTION * self.memory_bytes
        return passes_s + is_last * self.teacher_s if fits else math.inf


def choose_cut(costs: StageCosts) -> tuple[int, ...]:
    """Find the first block of each stage by dynamic programming. Raises ModelError: no cut fits the memory."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    """Number of blocks in the stages so far → seconds of the slowest stage, first block of each stage."""
    for stage in range(costs.num_stages):
        best = {
            end: min(
                (max(slowest_s, costs.stage_s(stage, first, end)), (*starts, first))
                for first, (slowest_s, starts) in best.items()
                if first < end
            )
            for end in range(stage + 1, len(costs.blocks) + 1)
        }
    slowest_s, starts = best[len(costs.blocks)]
    if slowest_s == math.inf:
        raise ModelError(
            f"no cut into {costs.num_stages} stages with parameters in each fits {costs.memory_bytes / 2**30:.1f} GiB per device:"
            " increase scale.pipeline_stages or scale.micro_batches"
        )
    return starts
