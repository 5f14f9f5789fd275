"""Points drawn from a space."""

import re

import pytest

from service.config.space import choices, points
from trainables.errors import ExperimentError


def test_randint_draws_both_ends_and_nothing_beyond_them() -> None:
    drawn = points({"seed": {"randint": [3, 5]}}, "random", num_samples=200, seed=0)
    assert sorted(point["seed"] for point in drawn) == [3, 4, 5]


@pytest.mark.parametrize(
    ("limits", "values"),
    [
        ([0.1, 0.5, 0.1], "[0.1, 0.2, 0.3, 0.4, 0.5]"),
        ([2, 8, 3], "[2, 5, 8]"),
        ([1, 2], "[1, 2]"),
        ([1e-4, 4e-4, 1.5e-4], "[0.0001, 0.00025, 0.0004]"),
        ([1, 2.2, 0.5], "[1.0, 1.5, 2.0]"),
    ],
)
def test_a_range_has_the_numbers_that_one_would_write(limits: list[float], values: str) -> None:
    assert str(choices("optim.lr", {"range": limits})) == values


def test_a_list_that_would_give_equal_trials_and_a_range_without_end_are_refused() -> None:
    for twice in ([4, 8, 4], [0, 0], ["sgd", "sgd"], [[1], [1]]):
        with pytest.raises(ExperimentError, match=re.escape(f"a.b: the list has {twice[-1]} twice")):
            choices("a.b", twice)
    with pytest.raises(ExperimentError, match="more than 10000: give it a larger step"):
        choices("a.b", {"range": [0, 1e300, 1e-300]})
