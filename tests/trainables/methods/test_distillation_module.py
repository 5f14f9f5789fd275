"""What each method counts, and when."""

from typing import Any

import pytest
from torch import nn

from tests.trainables.methods.calls import make
from trainables.config import DataConfig, DistillConfig, MethodOptions, TeacherConfig, TrainConfig
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.select import select_methods
from trainables.rules import METHOD_RULES, first_problem_of_methods

MAPS = ((4, 8, 8), (8, 4, 4))


def distillation_module(*, init_stage: bool = False, **options: dict[str, Any]) -> DistillationModule:
    """Methods with these options, for two maps on either side."""
    methods = {key: make(key, student_shapes=MAPS, teacher_shapes=MAPS, **own) for key, own in options.items()}
    return DistillationModule(nn.Identity(), methods, task_weight=0.5, epochs=10, init_stage=init_stage)


def test_the_weight_of_a_method_with_a_init_stage_only_is_that_of_the_stage() -> None:
    options = {"ab": {"weight": 2.0}, "fsp": {"weight": 0.25}, "ft": {"weight": 100.0}}
    assert distillation_module(init_stage=True, **options).weights(0.0) == {"task": 0.0, "ab": 2.0, "fsp": 0.25, "ft": 1.0}
    assert distillation_module(ft=options["ft"]).weights(0.0) == {"task": 0.5, "ft": 100.0}


def test_published_stages_count_one() -> None:
    assert distillation_module(init_stage=True, ab={}, fsp={}, ft={}).weights(0.0) == {
        "task": 0.0,
        "ab": 1.0,
        "fsp": 1.0,
        "ft": 1.0,
    }


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, {-1: 2, 0: 2, 5: 2, 10: 2, 11: 2}),
        ({"warmup_epochs": 4}, {-1: 0, 0: 0, 1: 0.5, 2: 1, 4: 2, 5: 2, 10: 2}),
        ({"warmup_epochs": 20}, {0: 0, 5: 0.5, 10: 1}),  # longer than the training
        # min(1, epoch / warm_up), with epochs from 0 in ReviewKD's CIFAR-100/train.py and from 1 in mdistiller's DKD.py
        ({"warmup_epochs": 4, "warmup_by": "epoch_from_0"}, {-1: 0, 0: 0, 0.9: 0, 1: 0.5, 3.5: 1.5, 4: 2, 9.9: 2}),
        ({"warmup_epochs": 4, "warmup_by": "epoch_from_1"}, {-1: 0, 0: 0.5, 0.9: 0.5, 1: 1, 2.5: 1.5, 3: 2, 9.9: 2}),
        ({"warmup_epochs": 2.5, "warmup_by": "epoch_from_1"}, {0.5: 0.8, 1.5: 1.6, 2: 2}),
        ({"decay": "linear"}, {0: 2, 2.5: 1.5, 5: 1, 10: 0, 11: 0}),
        ({"decay": "cosine"}, {0: 2, 2.5: 1 + 0.5**0.5, 5: 1, 7.5: 1 - 0.5**0.5, 10: 0, 11: 0}),
        ({"warmup_epochs": 5, "decay": "linear"}, {0: 0, 2.5: 0.75, 5: 1, 7.5: 0.5, 10: 0}),
        ({"warmup_epochs": 10, "decay": "cosine"}, {0: 0, 5: 0.5, 10: 0}),
    ],
    ids=str,
)
def test_a_weight_rises_and_falls_with_the_epochs_as_its_schedule_says(
    schedule: dict[str, Any], expected: dict[float, float]
) -> None:
    options = MethodOptions.model_validate({"weight": 2, **schedule})
    found = {epoch: options.weight_at(epoch, 10) for epoch in expected}
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_each_method_follows_its_own_schedule_and_the_task_none() -> None:
    both = distillation_module(fitnet={"weight": 100.0, "decay": "linear"}, nst={"weight": 50.0, "warmup_epochs": 8})
    assert both.weights(2.0) == pytest.approx({"task": 0.5, "fitnet": 80.0, "nst": 12.5})


@pytest.mark.parametrize("name", ["ab", "fsp"])
@pytest.mark.parametrize(("key", "value"), [("warmup_epochs", 2), ("warmup_by", "epoch_from_1"), ("decay", "cosine")])
def test_a_schedule_for_a_weight_that_stays_as_it_is_is_refused(name: str, key: str, value: object) -> None:
    assert problem_of(name, {key: value}) == (
        f"distill.options.{name}.{key}: {name} works in its init stage only, with a constant weight: leave {key} out"
    )
    rising = {"warmup_epochs": 2} if key == "warmup_by" else {}
    assert problem_of("ft", {key: value, **rising}) is None


def problem_of(name: str, options: dict[str, object]) -> str | None:
    """What is wrong with a method and its options."""
    distill = DistillConfig.model_validate({"method": [name], "options": {name: options}})
    teacher = TeacherConfig(model="resnet8", weights="x")
    settings = TrainConfig(output_dir="/", data=DataConfig(), model="resnet8", teacher=teacher, distill=distill)
    return first_problem_of_methods(lambda: select_methods(distill), settings, 10, METHOD_RULES)
