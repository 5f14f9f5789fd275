"""Where to cut a model: of the cuts that the devices' memory allows, that with the fastest slowest stage."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainables.distributed.pipeline.block_costs import Block
from trainables.errors import ModelError

MEMORY = 0.9
"""The share of a device's memory that a cut may fill: the rest is for what passes need for a moment, the teacher's too."""


@dataclass(frozen=True)
class StageCosts:
    """What runs of blocks cost as stages."""

    blocks: Sequence[Block]
    num_stages: int
    num_micro_batches: int
    schedule: str
    parameter_copies: float
    """A parameter, its gradient and the optimizer's state, in copies of the parameter."""
    memory_bytes: float = math.inf
    """Memory of a device."""
    teacher_s: float = 0.0
    """Its forward pass of one micro-batch, on the last stage."""
    teacher_bytes: float = 0.0

    @cached_property
    def _sums(self) -> NDArray[np.float64]:
        """Seconds, bytes of parameters and of activations of all blocks before each, and of all."""
        costs = [(each.forward_s + each.backward_s, each.parameter_bytes, each.activation_bytes) for each in self.blocks]
        return np.cumsum([(0.0, 0.0, 0.0), *costs], axis=0)

    def stage_s(self, stage: int, first: int, end: int) -> float:
        """Seconds of one micro-batch in a stage of the blocks [first, end); infinite where it trains nothing or does not fit."""
        passes_s, parameter_bytes, activation_bytes = (self._sums[end] - self._sums[first]).tolist()
        is_last = stage == self.num_stages - 1
        needed_bytes = self.parameter_copies * parameter_bytes + self._num_stored(stage) * activation_bytes
        fits = needed_bytes + is_last * self.teacher_bytes <= MEMORY * self.memory_bytes
        return passes_s + is_last * self.teacher_s if parameter_bytes and fits else math.inf

    def _num_stored(self, stage: int) -> int:
        """Micro-batches whose activations a stage has at once. Torch's 1F1B refuses fewer than stages: they run as GPipe."""
        if self.schedule == "gpipe" or self.num_micro_batches < self.num_stages:
            return self.num_micro_batches
        return self.num_stages - stage


def balanced_starts(num_blocks: int, num_stages: int, load: Callable[[int, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The largest load where that is smallest, and the first block of each stage there, by dynamic programming.

    `load`: of a stage, its first block and the block after its last; without end where that cannot be.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        best = {
            end: min(
                (max(most, load(stage, first, end)), (*starts, first)) for first, (most, starts) in best.items() if first < end
            )
            for end in range(stage + 1, num_blocks + 1)
        }
    return best[num_blocks]


def choose_cut(costs: StageCosts) -> tuple[int, ...]:
    """The first block of each stage. Raises ModelError: no cut fits the memory."""
    slowest_s, starts = balanced_starts(len(costs.blocks), costs.num_stages, costs.stage_s)
    if slowest_s == math.inf:
        raise ModelError(
            f"no cut into {costs.num_stages} stages with parameters in each fits {costs.memory_bytes / 2**30:.1f} GiB a device:"
            " write more scale.pipeline_stages, or more scale.micro_batches"
        )
    return starts
