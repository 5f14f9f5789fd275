"""The doctor on real runs with a fault in each: all named first, and the gain predicted that mending it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.doctor.terminal_lines import HEALTHY, case_lines
from tests.faults.runs import Bench
from tests.faults.trials import CAUSES, REPLAYED, Trials
from trainables.distributed.rank_pool import RankPool


@pytest.mark.slow
def test_every_fault_is_named_first_with_the_gain_that_mending_it_brings(ranks: RankPool, tmp_path: Path) -> None:
    bench = Bench(ranks, tmp_path)
    for num_workers in (1, 2):
        bench.run(num_workers, 16)  # libraries are loaded, caches filled
    trials = Trials(bench)
    assert [case_lines([case])[0][: len(HEALTHY)] for case in trials.clean.values()] == [HEALTHY, HEALTHY]
    verdicts = list(trials.singles())
    assert [one.faults for one in verdicts] == [(fault,) for fault in (*CAUSES, REPLAYED)]
    assert not [one for one in verdicts if not one.named]
    assert not [one for one in verdicts if one.off_points > 10]


@pytest.mark.slow
def test_of_a_slow_reader_and_a_slow_teacher_the_one_is_named_that_the_step_waits_for(ranks: RankPool, tmp_path: Path) -> None:
    bench = Bench(ranks, tmp_path)
    bench.run(1, 16)
    both = Trials(bench).verdict("throttled reader", "slow teacher")
    assert both.named
    assert both.off_points <= 10
