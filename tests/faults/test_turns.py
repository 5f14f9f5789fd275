"""Gains from blocks that alternate: right on a machine whose speed changes, with an error that says how sure they are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any, cast

import pytest

from tests.faults.runs import Bench, Training
from tests.faults.turns import ERROR_POINTS, FEWEST_ROUNDS, MOST_ROUNDS, Contender, Gain, compare, take_turns
from trainables.distributed.rank_pool import RankDiedError


class Machine:
    """One whose speed moves up and down by a third within ten seconds, and which stops for a second now and then."""

    def __init__(self, stops: float = 0.0) -> None:
        self._now_s, self._rng, self._stops = 0.0, random.Random(0), stops

    def run(self, work_s: float, sleep_s: float) -> float:
        """Seconds of so much work and sleep."""
        phase = self._now_s / 10 % 1
        took_s = work_s * (1 + 0.3 * abs(2 * phase - 1)) + sleep_s + (self._rng.random() < self._stops)
        self._now_s += took_s
        return took_s


class Simulated(Contender):
    """A training of 25 ms a step, and a fault that sleeps."""

    def __init__(self, machine: Machine, fault_s: float) -> None:
        super().__init__(Training(1, 10), [])
        self._machine, self._fault_s = machine, fault_s

    def block(self, steps: int) -> float:
        return sum(self._machine.run(0.025, self._fault_s) for _ in range(steps))


@pytest.mark.parametrize("stops", [0.0, 0.02])
def test_the_cost_of_a_fault_is_measured_whatever_the_speed_of_the_machine_does(stops: float) -> None:
    machine = Machine(stops)
    ill, half, fixed = (Simulated(machine, fault_s) for fault_s in (0.045, 0.0225, 0.0))
    gains = take_turns([ill, half, fixed])
    for gain, fault_s in zip(gains, (0.0225, 0.0), strict=True):
        true_pct = 100 * (1 - (0.025 * 1.15 + fault_s) / (0.025 * 1.15 + 0.045))
        assert gain.pct == pytest.approx(true_pct, abs=3)
    rounds = len(ill.ms_per_image)
    assert FEWEST_ROUNDS <= rounds <= MOST_ROUNDS
    assert rounds == MOST_ROUNDS or max(gain.error_points for gain in gains) <= ERROR_POINTS


def test_a_disturbed_round_changes_neither_a_gain_nor_its_error_much() -> None:
    rounds = [pct + step for pct, step in zip(itertools.repeat(60.0, 9), itertools.cycle((-1, 0, 1)), strict=False)]
    calm, disturbed = Gain.of(rounds), Gain.of([*rounds[:-1], -40.0])
    assert (calm.pct, disturbed.pct) == (60, 60)
    assert calm.error_points == pytest.approx(disturbed.error_points) == pytest.approx(1.2533 * 1.4826 / 3)


class DyingPool:
    """A pool of ranks: of the first training they wait for their turn, of the second they die before they ask for one."""

    def prepare(self, training: Training) -> tuple[None, None]:
        return None, None

    def pool(self, number: int) -> DyingPool:
        return self

    def run(self, num_ranks: int, function: Callable[..., Any], config: None, faults: Any, address: str, number: int) -> None:
        if number:
            raise RankDiedError("rank 0 died without a result")
        with Client(address) as pipe:
            pipe.send((number, 0))
            pipe.recv()


@pytest.mark.timeout(20)
def test_a_rank_that_dies_before_its_first_turn_ends_the_comparison() -> None:
    with pytest.raises(RankDiedError):
        compare(cast(Bench, DyingPool()), Training(1, 8), [Training(1, 8)])
