"""Cuts and micro-batches: compared with every cut there is, and with what can be worked out by hand."""

import math

import numpy as np
import pytest

from trainables.distributed.pipeline.costs import Block, Devices, Link, PassTime
from trainables.distributed.pipeline.plan import Planner
from trainables.distributed.pipeline.starts import all_starts
from trainables.errors import ModelError

MIB = 2**20
AT_ONCE = Link(latency_s=0.0, bytes_per_s=math.inf)


def _line(fixed_s: float, per_sample_s: float) -> PassTime:
    return PassTime((1, 2), (fixed_s + per_sample_s, fixed_s + 2 * per_sample_s))


def _block(index: int, forward_s: float, backward_s: float, *, fixed_s: float = 0.0, output_bytes: float = 0.0) -> Block:
    return Block(
        begins_at=f"layer{index}" if index else "",
        forward=_line(fixed_s, forward_s),
        backward=_line(fixed_s, backward_s),
        parameter_bytes=MIB,
        activation_bytes=MIB,
        output_bytes=output_bytes,
    )


def _random_blocks(rng: np.random.Generator, count: int) -> list[Block]:
    return [
        _block(index, *rng.uniform(0.01, 1, 2), fixed_s=rng.uniform(0, 0.1), output_bytes=rng.uniform(0, 1e3))
        for index in range(count)
    ]


def test_times_between_and_beyond_what_was_measured_lie_on_straight_lines() -> None:
    times = PassTime((2, 4, 16), (3.0, 4.0, 10.0))
    assert [times.seconds(size) for size in (2, 3, 4, 10, 16, 30)] == [3.0, 3.5, 4.0, 7.0, 10.0, 17.0]
    assert PassTime((4,), (2.0,)).seconds(8) == 4.0
    assert PassTime((2, 4), (2.0, 1.0)).seconds(8) == 1.0, "noise: a larger pass takes no less"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_wait_for_the_share_of_the_bubble_formula(schedule: str) -> None:
    blocks = [_block(index, 1.0, 2.0) for index in range(3)]
    plan = Planner(blocks, Devices(3, link=AT_ONCE), schedule).expect((0, 1, 2), 8, 8)
    assert plan.step_s == pytest.approx(3.0 * (2 + 8))
    assert plan.bubble == pytest.approx(2 / (8 + 2))


def test_memory_is_that_of_a_stages_parameters_and_of_the_micro_batches_it_stores() -> None:
    blocks = [_block(index, 1.0, 1.0, output_bytes=MIB / 2) for index in range(4)]
    memory = {
        schedule: Planner(blocks, Devices(4, link=AT_ONCE), schedule).expect((0, 1, 2, 3), 16, 16).stages[1].memory_bytes
        for schedule in ("gpipe", "1f1b")
    }
    assert memory == {"gpipe": (3 + 1.5 * 16) * MIB, "1f1b": (3 + 1.5 * 3) * MIB}


@pytest.mark.parametrize("most_cuts", [2000, 5], ids=["all compared", "by dynamic programming"])
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))])
def test_the_plan_is_as_fast_as_the_best_of_all_cuts(seed: int, most_cuts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainables.distributed.pipeline.plan.ALL_CUTS", most_cuts)
    rng = np.random.default_rng(seed)
    blocks = _random_blocks(rng, int(rng.integers(3, 30)))
    num_stages, num_samples = int(rng.integers(2, 4)), int(rng.integers(1, 13))
    link = Link(0.0, float(rng.choice([1e3, 1e4, 1e9])), overlapped=bool(rng.integers(2)))
    planner = Planner(blocks, Devices(num_stages, link=link), str(rng.choice(["gpipe", "1f1b"])))
    best_s = min(
        planner.expect(starts, num_samples, number).step_s
        for starts in all_starts(len(blocks), num_stages)
        for number in {*(2**power for power in range(4) if 2**power <= num_samples), num_samples}
    )
    assert planner.plan(num_samples).step_s <= (1 + 1e-9 if most_cuts == 2000 else 1.02) * best_s


@pytest.mark.parametrize("most_cuts", [2000, 5], ids=["all compared", "by dynamic programming"])
@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_best_one_with_a_teacher_on_the_last_stage(
    seed: int, most_cuts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainables.distributed.pipeline.plan.ALL_CUTS", most_cuts)
    rng = np.random.default_rng(seed)
    blocks, teacher = _random_blocks(rng, int(rng.integers(3, 9))), _random_blocks(rng, int(rng.integers(3, 9)))
    planner = Planner(blocks, Devices(2, link=Link(0.0, 1e4)), str(rng.choice(["gpipe", "1f1b"])), teacher)
    best_s = min(planner.expect(starts, 8, 4).step_s for starts in all_starts(len(blocks), 2))
    assert planner.plan(8, num_micro_batches=4).step_s <= (1 + 1e-9 if most_cuts == 2000 else 1.05) * best_s


def test_a_teachers_parameters_and_what_its_passes_need_are_in_the_memory_of_the_last_stage() -> None:
    blocks = [_block(index, 1.0, 1.0) for index in range(2)]
    teacher = [_block(index, 1.0, 0.0, output_bytes=MIB / 4) for index in range(3)]

    def memory_mib(teacher: list[Block], teacher_share: float = 1.0) -> list[float]:
        plan = Planner(blocks, Devices(2, link=AT_ONCE), "1f1b", teacher, teacher_share).expect((0, 1), 8, 4)
        return [stage.memory_bytes / MIB for stage in plan.stages]

    first, last = memory_mib([])
    assert memory_mib(teacher) == [first, last + 3 + 2 * 1 + 8 / 4]
    assert memory_mib(teacher, 1 / 2) == [first, last + 3 / 2 + 2 * 1 + 8 / 4]


def test_a_plan_that_does_not_fit_is_left_out_and_none_that_fits_is_an_error() -> None:
    blocks = [_block(0, 1.0, 1.0), *(_block(index, 0.01, 0.01) for index in range(1, 5))]
    fast = Planner(blocks, Devices(2, link=AT_ONCE), "gpipe").plan(4)
    assert fast.cuts == ("layer1",)
    fits = Planner(blocks, Devices(2, link=AT_ONCE, memory_bytes=22 * MIB), "gpipe").plan(4)
    assert fits.cuts in (("layer2",), ("layer3",))
    with pytest.raises(ModelError, match="no cut into 2 stages with parameters in each fits"):
        Planner(blocks, Devices(2, memory_bytes=5 * MIB), "gpipe").plan(4)
    with pytest.raises(ModelError, match="4 cut points, and 6 stages need 5"):
        Planner(blocks, Devices(6), "gpipe").plan(4)


def test_what_is_given_is_not_planned() -> None:
    blocks = [_block(index, 1.0, 2.0) for index in range(8)]
    plan = Planner(blocks, Devices(2, link=AT_ONCE), "1f1b").plan(8, starts=(0, 2), num_micro_batches=2)
    assert (plan.cuts, plan.num_micro_batches) == (("layer2",), 2)


def test_no_stage_is_without_parameters() -> None:
    blocks = [_block(index, 1.0, 1.0) for index in range(4)]
    pooling = Block("pool", _line(0, 9.0), _line(0, 9.0), 0, MIB, 0.0)
    plan = Planner([*blocks[:2], pooling, *blocks[2:]], Devices(3, link=AT_ONCE), "1f1b").plan(4)
    assert all(stage.parameter_bytes for stage in plan.stages)


def test_micro_batches_are_no_smaller_than_what_was_measured() -> None:
    times = PassTime((4, 8), (1.0, 2.0))
    blocks = [Block(f"layer{index}" if index else "", times, times, MIB, 0.0, 0.0) for index in range(4)]
    assert Planner(blocks, Devices(2, link=AT_ONCE), "1f1b").plan(12).num_micro_batches == 3


def test_an_all_reduce_is_hidden_behind_the_backward_pass_of_ddp_alone() -> None:
    blocks = [_block(index, 1.0, 2.0) for index in range(2)]

    def step_s(bytes_per_s: float, num_stages: int = 1) -> float:
        devices = Devices(num_stages, num_replicas=2, link=AT_ONCE, all_reduce_bytes_per_s=bytes_per_s)
        return Planner(blocks, devices, "1f1b").expect(tuple(range(num_stages)), 1, 1).step_s

    assert step_s(2 * MIB / 4) == 6.0
    assert step_s(2 * MIB / 5) == pytest.approx(7.0)
    assert step_s(MIB / 4, num_stages=2) == pytest.approx(6.0 + 4.0)
