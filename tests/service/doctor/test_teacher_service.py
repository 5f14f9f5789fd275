"""When a teacher's service pays, in numbers."""

import itertools
import re
from dataclasses import replace

import pytest

from service.doctor.causes import enough_actors, service_advice
from tests.service.doctor.runs import RANK, longer, run_of

GRID = [(t, s, n) for t in (1.0, 10.0, 40.0, 125.0, 300.0) for s in (10.0, 75.0, 200.0) for n in (1, 2, 3, 8)]


def pays(teacher_ms: float, rest_ms: float, workers: int, students: int, actors: int) -> bool:
    """Whether a step of all students takes less with the actors than with their GPUs as workers, which work without loss."""
    num_requests = students * workers
    served_ms = max(rest_ms, workers * teacher_ms / actors)
    return served_ms < (rest_ms + teacher_ms) * num_requests / (num_requests + actors) * (1 - 1e-9)


def test_the_fewest_actors_that_hide_a_teacher_answer_as_fast_as_its_students_step() -> None:
    for t, s, n in GRID:
        m = enough_actors(n * t, s)
        assert n * t / m <= s * (1 + 1e-9)
        assert m == 1 or n * t / (m - 1) > s


def test_the_advice_names_the_fewest_students_for_whom_a_service_pays_and_one_alone_never_does() -> None:
    for t, s, n in GRID:
        rank = replace(RANK, teacher_ms=t, step_ms=s + t)
        found = re.match(r"with (\d+) or more students .*--set teacher.service=(\d+)", service_advice(run_of(*[rank] * n)))
        assert found is not None
        students, actors = int(found[1]), int(found[2])
        assert pays(t, s, n, students, actors)
        assert not pays(t, s, n, students - 1, actors)
    assert not any(pays(t, s, n, 1, m) for (t, s, n), m in itertools.product(GRID, range(1, 40)))


@pytest.mark.parametrize(("memory_mib", "those"), [(None, "2 cores compute"), (1000.0, "2 GPUs compute")])
def test_the_advice_says_when_it_does_not_pay_too(memory_mib: float | None, those: str) -> None:
    heavy = run_of(longer(RANK, teacher=125), peak_memory_mib=memory_mib)  # 150 ms beside 75
    advice = service_advice(heavy)
    assert advice.startswith("with 2 or more students side by side (sweep.max_concurrent), --set teacher.service=2, whose")
    assert those in advice
    assert advice.endswith("one student alone gains more from as many workers")
