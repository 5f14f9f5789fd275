"""Where to cut a model: of the cuts that the devices' memory allows, that with the fastest slowest stage."""

import math
from collections.abc import Sequence
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
        # Of GPipe all micro-batches are stored at once; torch's 1F1B refuses fewer than stages, which run as GPipe.
        is_gpipe, is_last = self.schedule == "gpipe" or self.num_micro_batches < self.num_stages, stage == self.num_stages - 1
        num_stored = self.num_micro_batches if is_gpipe else self.num_stages - stage
        needed_bytes = self.parameter_copies * parameter_bytes + num_stored * activation_bytes + is_last * self.teacher_bytes
        fits = parameter_bytes and needed_bytes <= MEMORY * self.memory_bytes
        return passes_s + is_last * self.teacher_s if fits else math.inf


def choose_cut(costs: StageCosts) -> tuple[int, ...]:
    """The first block of each stage, by dynamic programming. Raises ModelError: no cut fits the memory."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    """By the number of blocks in the stages so far: the seconds of the slowest one, and the first block of each."""
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
            f"no cut into {costs.num_stages} stages with parameters in each fits {costs.memory_bytes / 2**30:.1f} GiB a device:"
            " write more scale.pipeline_stages, or more scale.micro_batches"
        )
    return starts
