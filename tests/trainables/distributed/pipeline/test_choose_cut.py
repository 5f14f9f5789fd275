"""The cut with the fastest slowest stage, among those that fit the memory."""

import dataclasses
import math
from itertools import combinations, pairwise

import numpy as np
import pytest

from trainables.distributed.pipeline.block_costs import Block
from trainables.distributed.pipeline.choose_cut import StageCosts, choose_cut
from trainables.errors import ModelError

MIB = 2**20


def _block(forward_s: float = 1.0, backward_s: float = 2.0, *, parameters: int = MIB, activations: int = MIB) -> Block:
    return Block("", forward_s, backward_s, parameters, activations)


def _costs(blocks: list[Block], num_stages: int, schedule: str = "1f1b", **options: float) -> StageCosts:
    return StageCosts(blocks, num_stages, 4 * num_stages, schedule, 3.0, **options)


def _slowest_s(costs: StageCosts, starts: tuple[int, ...]) -> float:
    return max(costs.stage_s(stage, *part) for stage, part in enumerate(pairwise((*starts, len(costs.blocks)))))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_that_fits_has_a_faster_slowest_stage(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_blocks, num_stages = int(rng.integers(4, 12)), int(rng.integers(2, 5))
    blocks = [
        _block(*rng.uniform(0, 3, 2), parameters=int(rng.integers(0, 3)) * MIB, activations=int(rng.integers(0, 3)) * MIB)
        for _ in range(num_blocks)
    ]
    costs = _costs(
        blocks, num_stages, str(rng.choice(["gpipe", "1f1b"])), memory_bytes=60 * MIB, teacher_s=float(rng.uniform(0, 4))
    )
    all_starts = [(0, *cuts) for cuts in combinations(range(1, num_blocks), num_stages - 1)]
    best_s = min(_slowest_s(costs, starts) for starts in all_starts)
    if best_s == math.inf:
        with pytest.raises(ModelError, match=rf"no cut into {num_stages} stages with parameters in each fits"):
            choose_cut(costs)
    else:
        assert _slowest_s(costs, choose_cut(costs)) == pytest.approx(best_s)


def test_the_teacher_is_a_part_of_the_last_stage() -> None:
    blocks = [_block() for _ in range(6)]
    assert choose_cut(_costs(blocks, 2)) == (0, 3)
    assert choose_cut(_costs(blocks, 2, teacher_s=6.0)) == (0, 4)
    assert choose_cut(_costs(blocks, 2, memory_bytes=40 * MIB, teacher_bytes=26 * MIB)) == (0, 4)


def test_the_schedule_says_how_many_micro_batches_a_stage_stores() -> None:
    """Of three stages with a block of 1 MiB each, and 12 micro-batches."""
    costs = _costs([_block() for _ in range(3)], 3, memory_bytes=7 * MIB)
    fits = [costs.stage_s(stage, stage, stage + 1) < math.inf for stage in range(3)]
    assert fits == [True, True, True], "3 + 3, 3 + 2 and 3 + 1 MiB"
    assert costs.stage_s(2, 1, 3) == math.inf, "2 · (3 + 1) MiB"
    gpipe = dataclasses.replace(costs, schedule="gpipe")
    assert [gpipe.stage_s(stage, stage, stage + 1) for stage in range(3)] == [math.inf] * 3, "3 + 12 MiB"


def test_no_stage_is_without_parameters() -> None:
    blocks = [_block(), _block(), _block(9.0, 9.0, parameters=0), _block(), _block()]
    costs = _costs(blocks, 3)
    assert all(sum(block.parameter_bytes for block in blocks[slice(*part)]) for part in pairwise((*choose_cut(costs), 5)))
