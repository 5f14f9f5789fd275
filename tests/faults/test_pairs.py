"""The doctor on simulated trainings: each fault, every two at once, and trainings in which nothing is wrong."""

import pytest

from service.doctor.causes import findings
from tests.faults.pairs import FAULTS, HEALTHY, trials
from tests.faults.simulated import run

POINTS = 5.0
"""A gain is right within so many points of what fixing brings."""


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_training_in_which_nothing_is_wrong_has_no_finding(kind: str) -> None:
    assert findings(run(HEALTHY[kind]).evidence) == []


@pytest.mark.processes
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_finding_is_what_fixing_brings_most_and_the_gain_comes_true(number: int) -> None:
    verdicts = list(trials(number))
    assert {fault for one in verdicts for fault in one.faults} == set(FAULTS)
    assert sum(one.right for one in verdicts) >= 0.95 * len(verdicts)
    assert sum(max(one.off_points[:1], default=0.0) <= POINTS for one in verdicts) >= 0.95 * len(verdicts)
    every = [off for one in verdicts for off in one.off_points]
    assert sum(off <= POINTS for off in every) >= 0.95 * len(every)
    assert sum(bool(one.false_alarms) for one in verdicts) <= 0.05 * len(verdicts)
