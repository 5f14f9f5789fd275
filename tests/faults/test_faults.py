"""The doctor on real runs with a fault in each: all named first, and the gain predicted that fixing it measures."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.doctor.terminal_lines import HEALTHY, case_lines
from tests.faults.runs import Bench, Training
from tests.faults.trials import CAUSES, REPLAYED, Trials


@pytest.fixture
def trials(tmp_path: Path) -> Iterator[Trials]:
    with Bench(tmp_path) as bench:
        for workers in (1, 2):
            bench.run(Training(workers, 16))  # libraries are loaded, caches filled
        yield Trials(bench)


@pytest.mark.slow
def test_every_fault_is_named_first_with_the_gain_that_fixing_it_brings(trials: Trials) -> None:
    assert [case_lines([case])[0][: len(HEALTHY)] for case in trials.clean.values()] == [HEALTHY, HEALTHY]
    verdicts = list(trials.singles())
    assert [one.faults for one in verdicts] == [(fault,) for fault in (*CAUSES, REPLAYED)]
    assert not [one for one in verdicts if not one.named]
    assert not [one for one in verdicts if one.off_points > 10]


@pytest.mark.slow
def test_of_a_slow_reader_and_a_slow_teacher_the_one_is_named_that_the_step_waits_for(trials: Trials) -> None:
    both = trials.verdict("throttled reader", "slow teacher")
    assert both.named
    assert both.off_points <= 10
