"""Runs of a model's blocks as pipeline stages, by the first block of each: all, balanced ones, and those next to some."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import numpy as np

from trainables.distributed.pipeline.costs import Array

Starts = tuple[int, ...]
"""The first block of each stage."""
MOVES = (-2, -1, 1, 2)
"""By so many blocks a cut is moved to find a better one."""


def all_starts(num_blocks: int, num_stages: int) -> Iterator[Starts]:
    """All stages of one block and more."""
    return ((0, *cuts) for cuts in combinations(range(1, num_blocks), num_stages - 1))


def stage_parts(starts: Starts, num_blocks: int) -> list[tuple[int, int, int]]:
    """(stage, first block, block after its last)."""
    return [(stage, *part) for stage, part in enumerate(pairwise((*starts, num_blocks)))]


def neighbours(starts: Starts, num_blocks: int) -> Iterator[Starts]:
    """Those with one cut moved by a few blocks."""
    for index, move in product(range(1, len(starts)), MOVES):
        moved = (*starts[:index], starts[index] + move, *starts[index + 1 :])
        if all(first < end for first, end in pairwise((*moved, num_blocks))):
            yield moved


def balanced_starts(loads_s: Sequence[Array]) -> Starts | None:
    """The stages whose slowest is fastest, by dynamic programming; None: every one has a load without end.

    `loads_s`: of each stage, by its first block and the block after its last; without end where that cannot be.
    """
    # Of the slowest of the stages so far, by the block after their last.
    slowest_s = np.where(np.arange(len(loads_s[0])) == 0, 0.0, math.inf)
    chosen = []
    for load_s in loads_s:
        options_s = np.maximum(slowest_s[:, None], load_s)
        chosen.append(options_s.argmin(axis=0))
        slowest_s = options_s.min(axis=0)
    if slowest_s[-1] == math.inf:
        return None
    starts = [len(slowest_s) - 1]
    for firsts in reversed(chosen):
        starts.append(int(firsts[starts[-1]]))
    return tuple(starts[:0:-1])
