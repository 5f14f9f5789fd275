"""How many actors of a teacher's service are proposed."""

import itertools

import pytest

from service.doctor.causes import causes, enough_actors
from tests.service.doctor.runs import RANK, longer, run_of


def test_the_fewest_actors_that_hide_a_teacher_answer_as_fast_as_its_students_step() -> None:
    for t, s, n in itertools.product((1.0, 10.0, 40.0, 125.0, 300.0), (10.0, 75.0, 200.0), (1, 2, 3, 8)):
        m = enough_actors(n * t, s)
        assert n * t / m <= s * (1 + 1e-9)
        assert m == 1 or n * t / (m - 1) > s


@pytest.mark.parametrize("memory_mib", [None, 1000.0])
def test_a_service_is_proposed_for_several_students_with_its_number_of_actors(memory_mib: float | None) -> None:
    heavy = run_of(longer(RANK, teacher=125), peak_memory_mib=memory_mib)  # 150 ms beside 75
    change = next(cause.change for cause in causes(heavy) if cause.name == "teacher-bound")
    assert "for several students side by side (sweep.max_concurrent), --set teacher.service=2, " in change
