"""What each method counts, and when."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.trainables.methods.calls import make
from trainables.config import DistillConfig, MethodOptions
from trainables.errors import ExperimentError
from trainables.methods import load
from trainables.methods.contract import Method
from trainables.methods.pupil import Pupil, choose

MAPS = ((4, 8, 8), (8, 4, 4))


def pupil(**options: dict[str, Any]) -> Pupil:
    """Methods with these options, for two maps on either side."""
    methods: dict[str, Method] = {}
    told: dict[str, MethodOptions] = {}
    for key, own in options.items():
        methods[key] = make(key, student_shapes=MAPS, teacher_shapes=MAPS, **own)
        told[key] = load(key).Options.model_validate(own)
    return Pupil(nn.Identity(), methods, told, task_weight=0.5, epochs=10)


def test_the_weight_of_a_method_with_a_warm_up_stage_alone_is_that_of_the_stage() -> None:
    both = pupil(ab={"weight": 2.0}, fsp={"weight": 0.25}, ft={"weight": 100.0})
    assert both.weights(-3.0) == {"task": 0.0, "ab": 2.0, "fsp": 0.25, "ft": 1.0}
    assert both.weights(0.0)["ft"] == 100.0


def test_published_stages_count_one() -> None:
    assert pupil(ab={}, fsp={}, ft={}).weights(-1.0) == {"task": 0.0, "ab": 1.0, "fsp": 1.0, "ft": 1.0}


@pytest.mark.parametrize("name", ["ab", "fsp"])
@pytest.mark.parametrize(("key", "value"), [("warmup_epochs", 2), ("decay", "cosine")])
def test_a_schedule_for_a_weight_that_stays_as_it_is_is_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(ExperimentError) as caught:
        choose(DistillConfig.model_validate({"method": [name], "options": {name: {key: value}}}))
    assert str(caught.value) == (
        f"distill.options.{name}.{key}: {name} works in its warm-up stage alone, throughout which its weight is the same:"
        f" leave {key} out"
    )
    assert choose(DistillConfig.model_validate({"method": ["ft"], "options": {"ft": {key: value}}}))
