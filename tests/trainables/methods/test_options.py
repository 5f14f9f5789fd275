"""What a method's options refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from trainables.methods import METHODS, load


def numbers(options: type[Any]) -> list[str]:
    """The options that are fractional numbers."""
    return [name for name, field in options.model_fields.items() if field.annotation is float]


@pytest.mark.parametrize("name", METHODS)
def test_no_number_of_a_method_is_infinite_or_a_truth_value(name: str) -> None:
    options = load(name).Options
    assert "weight" in numbers(options)
    for option in numbers(options):
        for value in (math.nan, math.inf, True):
            with pytest.raises(ValidationError):
                options(**{option: value})


@pytest.mark.parametrize("name", METHODS)
def test_no_method_has_a_weight_below_zero(name: str) -> None:
    with pytest.raises(ValidationError):
        load(name).Options(weight=-1)
