"""Mean, deviation, tolerance and verdict, with numbers worked out by hand."""

import math

import pytest

from service.reproduce.verdict import MeanAccuracy, compare_accuracy, tolerance


def verdict_of(finished: list[float], **changed: object) -> str:
    settings = {"num_published": 5, "min_tolerance": 0.5, "num_seeds": len(finished), "comparable": True}
    return compare_accuracy(70.0, finished, **{**settings, **changed}).outcome  # type: ignore[arg-type]


def test_the_deviation_is_the_samples_and_one_run_has_none() -> None:
    assert MeanAccuracy.of([]) is None
    assert MeanAccuracy.of([70.0]) == MeanAccuracy(70.0, None, 1)
    three = MeanAccuracy.of([70.0, 71.0, 72.0])
    assert three == MeanAccuracy(71.0, 1.0, 3)


@pytest.mark.parametrize(
    ("std", "num", "num_published", "allowed"),
    [
        (None, 1, 5, 0.5),
        (0.1, 3, 5, 0.5),  # 0.146
        (0.5, 3, 5, 2 * 0.5 * math.sqrt(8 / 15)),  # 0.730
        (3.0, 3, 5, 1.0),  # 4.38
    ],
)
def test_the_tolerance_is_two_standard_errors_between_the_least_and_twice_that(
    std: float | None, num: int, num_published: int, allowed: float
) -> None:
    assert tolerance(MeanAccuracy(70.0, std, num), num_published, 0.5) == pytest.approx(allowed)


def test_a_mean_within_the_tolerance_passes_and_one_beyond_it_fails_on_both_sides() -> None:
    assert verdict_of([69.6, 69.7, 69.5]) == "pass"
    assert verdict_of([69.4, 69.5, 69.3]) == "fail"
    assert verdict_of([70.7, 70.6, 70.8]) == "fail"


def test_too_few_seeds_and_changed_settings_give_no_verdict() -> None:
    assert verdict_of([70.0], num_seeds=3) == "unfinished"
    assert verdict_of([70.0], comparable=False) == "not comparable"
    assert verdict_of([], num_seeds=3) == "-"
