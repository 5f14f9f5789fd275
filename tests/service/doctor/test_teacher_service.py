"""When a teacher's service pays: the rule, and the formulas under it, in numbers."""

import itertools

import pytest

from service.doctor.teacher_service import advice, hiding, least_students, served_ms
from tests.service.doctor.runs import RANK, longer, run_of

GRID = [(t, s, n) for t in (1.0, 10.0, 40.0, 125.0, 300.0) for s in (10.0, 75.0, 200.0) for n in (1, 2, 3, 8)]


def spread_ms(teacher_ms: float, rest_ms: float, workers: int, students: int, more: int) -> float:
    """A = (s + t)·k·n/(k·n + m): a step where the actors' GPUs are workers instead, which work without loss."""
    num_requests = students * workers
    return (rest_ms + teacher_ms) * num_requests / (num_requests + more)


def pays(teacher_ms: float, rest_ms: float, workers: int, students: int, actors: int) -> bool:
    """Whether the actors' GPUs do more for all students as a service than as workers: B < A."""
    served = served_ms(teacher_ms, rest_ms, workers, actors)
    return served < spread_ms(teacher_ms, rest_ms, workers, students, actors) * (1 - 1e-9)


def test_the_fewest_actors_that_hide_a_teacher_answer_as_fast_as_its_students_step() -> None:
    assert hiding(10.0, 40.0, 1) == 1
    assert hiding(40.0, 10.0, 1) == 4
    assert hiding(40.0, 12.0, 2) == 7
    for t, s, n in GRID:
        m = hiding(t, s, n)
        assert served_ms(t, s, n, m) == pytest.approx(s)
        assert m == 1 or served_ms(t, s, n, m - 1) > s


def test_three_students_of_a_heavy_teacher_do_more_with_a_service_than_with_its_gpus_as_workers() -> None:
    # t = 40, s = 10, one worker each, four actors: 7 GPUs take 10 ms a step, as workers 50 · 3/7 = 21.4.
    assert served_ms(40.0, 10.0, 1, 4) == 10.0
    assert spread_ms(40.0, 10.0, 1, 3, 4) == pytest.approx(150 / 7)
    assert pays(40.0, 10.0, 1, 3, 4)


def test_one_student_alone_never_does() -> None:
    assert not any(pays(t, s, n, 1, m) for (t, s, n), m in itertools.product(GRID, range(1, 40)))


def test_it_pays_between_too_few_actors_and_too_many() -> None:
    for (t, s, n), k, m in itertools.product(GRID, (2, 3, 5), range(1, 60)):
        fewest, most = k * n * t / (k * s + (k - 1) * t), k * n * t / s
        if min(abs(m - fewest), abs(m - most)) > 1e-6:
            assert pays(t, s, n, k, m) == (fewest < m < most)


def test_the_least_number_of_students_is_the_least_for_whom_it_pays() -> None:
    for t, s, n in GRID:
        m = hiding(t, s, n)
        k = least_students(t, s, n, m)
        assert pays(t, s, n, k, m)
        assert not pays(t, s, n, k - 1, m)
    assert least_students(1.0, 200.0, 1, 1) == 201  # an actor for a light teacher idles until many share it


def test_the_advice_says_when_it_does_not_pay_too() -> None:
    heavy = run_of(longer(RANK, teacher=125))  # 150 ms beside 75
    assert advice(heavy) == (
        "with 2 or more students side by side (sweep.max_concurrent), 2 cores that compute the teacher once for all of them "
        "(--set teacher.service=2); one student alone gains more from them as workers"
    )
    light = run_of(longer(RANK, teacher=35), peak_memory_mib=1000.0)  # 60 ms beside 75
    assert ", one GPU that computes the teacher once" in advice(light)
