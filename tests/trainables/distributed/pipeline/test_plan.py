"""Cuts and micro-batches: compared with every cut there is, and with the formula of the bubble."""

from itertools import combinations

import numpy as np
import pytest

from trainables.distributed.pipeline.plan import Block, Devices, Line, Planner, order, step_seconds
from trainables.errors import ModelError

MIB = 2**20


def _block(index: int, forward_s: float, backward_s: float, *, fixed_s: float = 0.0, output_bytes: float = 0.0) -> Block:
    return Block(
        begins_at=f"layer{index}" if index else "",
        forward=Line(fixed_s, forward_s),
        backward=Line(fixed_s, backward_s),
        parameter_bytes=MIB,
        activation_bytes=MIB,
        output_bytes=output_bytes,
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 1), (2, 4), (3, 5), (4, 8)])
def test_equal_stages_wait_for_the_share_of_the_bubble_formula(schedule: str, num_stages: int, num_micro_batches: int) -> None:
    blocks = [_block(index, 1.0, 2.0) for index in range(num_stages)]
    planner = Planner(blocks, Devices(num_stages), schedule)
    plan = planner.expect(range(num_stages), num_micro_batches, num_micro_batches)
    assert plan.step_s == pytest.approx(3.0 * (num_stages - 1 + num_micro_batches))
    assert plan.bubble == pytest.approx((num_stages - 1) / (num_micro_batches + num_stages - 1))


def test_1f1b_stores_activations_of_as_many_micro_batches_as_stages_follow() -> None:
    running, most = 0, 0
    for each in order("1f1b", stage=1, num_stages=4, num_micro_batches=16):
        running += 1 if each.kind == "forward" else -1
        most = max(most, running)
    assert most == 3
    blocks = [_block(index, 1.0, 1.0) for index in range(4)]
    memory = {
        schedule: Planner(blocks, Devices(4), schedule).expect(range(4), 16, 16).stages[1].memory_bytes
        for schedule in ("gpipe", "1f1b")
    }
    assert memory == {"gpipe": (3 + 16) * MIB, "1f1b": (3 + 3) * MIB}


def test_a_slow_send_delays_the_stages_on_both_sides() -> None:
    ended = step_seconds([1.0, 1.0], [1.0, 1.0], [0.5], "gpipe", 1)
    assert ended == (5.0, 3.5)


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_is_as_fast_as_the_best_of_all_cuts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = [
        _block(index, *rng.uniform(0.01, 1, 2), fixed_s=rng.uniform(0, 0.1), output_bytes=rng.uniform(0, 1e3))
        for index in range(rng.integers(3, 30))
    ]
    num_stages, num_samples = int(rng.integers(2, 4)), int(rng.integers(1, 13))
    devices = Devices(num_stages, bytes_per_s=float(rng.choice([1e3, 1e4, 1e9])))
    planner = Planner(blocks, devices, str(rng.choice(["gpipe", "1f1b"])))
    best = min(
        planner.expect((0, *cuts), num_samples, number).step_s
        for cuts in combinations(range(1, len(blocks)), num_stages - 1)
        for number in {*(2**power for power in range(4) if 2**power <= num_samples), num_samples}
    )
    assert planner.plan(num_samples).step_s <= 1.01 * best


def test_a_plan_that_does_not_fit_is_left_out_and_none_that_fits_is_an_error() -> None:
    blocks = [_block(0, 1.0, 1.0), *(_block(index, 0.01, 0.01) for index in range(1, 5))]
    fast = Planner(blocks, Devices(2), "gpipe").plan(4)
    assert fast.cuts == ("layer1",)
    fits = Planner(blocks, Devices(2, memory_bytes=22 * MIB), "gpipe").plan(4)
    assert fits.cuts in (("layer2",), ("layer3",))
    with pytest.raises(ModelError, match="no cut into 2 stages fits"):
        Planner(blocks, Devices(2, memory_bytes=5 * MIB), "gpipe").plan(4)
    with pytest.raises(ModelError, match="4 cut points, and 6 stages need 5"):
        Planner(blocks, Devices(6), "gpipe").plan(4)


def test_the_last_stage_gets_fewer_blocks_where_it_runs_the_teacher_too() -> None:
    blocks = [_block(index, 1.0, 2.0) for index in range(8)]
    alone = Planner(blocks, Devices(2), "1f1b").plan(8)
    beside_teacher = Planner(blocks, Devices(2), "1f1b", last_stage_s=Line(0.0, 6.0)).plan(8)
    assert alone.cuts == ("layer4",)
    assert beside_teacher.cuts == ("layer5",)
