"""Points drawn from a space."""

import re
from typing import Any

import pytest

from service.config.experiment import load
from service.config.space import SpaceError, choices, points, with_stages_axis
from service.sweeps.preflight import check_sweep
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
        with pytest.raises(SpaceError, match=re.escape(f"a.b: the list has {twice[-1]} twice")):
            choices("a.b", twice)
    with pytest.raises(SpaceError, match="more than 10000: give it a larger step"):
        choices("a.b", {"range": [0, 1e300, 1e-300]})


@pytest.mark.parametrize(
    ("workers", "stages"),
    [({}, [1, 2, 4]), ({"scale.num_workers": [1, 6]}, [1, 2, 3, 6]), ({"scale.num_workers": {"range": [2, 4, 2]}}, [1, 2, 4])],
)
def test_automatic_pipeline_stages_are_all_that_divide_a_number_of_workers(workers: dict[str, Any], stages: list[int]) -> None:
    space = {**workers, "scale.pipeline_stages": "auto"}
    assert with_stages_axis(space, num_workers=4) == {**workers, "scale.pipeline_stages": stages}


def test_automatic_pipeline_stages_are_numbers_in_the_experiment_that_is_written_down() -> None:
    resolved = load("digits", ["scale.num_workers=4", "sweep.space={scale.pipeline_stages: auto}", "sweep.policy=guided"])
    assert resolved.experiment.sweep.space == {"scale.pipeline_stages": [1, 2, 4]}


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (
            ["scale.pipeline_stages=auto", "scale.cut=[layer2]"],
            "cut names 1 modules for a number of pipeline_stages: write that number, or leave cut out",
        ),
        (
            [
                "sweep.policy=random",
                "sweep.space={scale.num_workers: {randint: [1, 4]}, scale.pipeline_stages: auto}",
            ],
            "auto divides numbers of workers: write scale.num_workers as a list or a range",
        ),
    ],
)
def test_automatic_pipeline_stages_without_numbers_to_divide_are_refused_in_one_line(sets: list[str], says: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(says)) as caught:
        load("digits", sets)
    assert "\n" not in str(caught.value)


def test_a_trial_of_a_sweep_has_one_number_of_stages_and_a_run_may_choose_it() -> None:
    resolved = load("digits", ["scale.num_workers=4", "scale.pipeline_stages=auto"])
    scale = resolved.experiment.scale
    assert (scale.pipeline_stages, scale.num_stages, scale.num_replicas) == ("auto", 1, 4)
    with pytest.raises(ExperimentError, match=r"write sweep\.space: \{scale\.pipeline_stages: auto\}, or here a number"):
        check_sweep(resolved)
