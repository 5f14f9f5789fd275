"""The rules between keys: the driver refuses an experiment, and a worker its job, with the same message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.config.dotted import put
from service.config.experiment import load, parse_override
from tests.trainables.jobs import Recorded, no_telemetry
from trainables.config import DataConfig, TrainConfig
from trainables.distributed.group import Group
from trainables.engine.job import build
from trainables.errors import ExperimentError
from trainables.methods import METHODS
from trainables.methods import load_method as load_method
from trainables.rules import METHOD_RULES, RULES, enough_images, first_problem_of_method

GPU = ("data.augment=crop_flip", "data.decoder=gpu")


def refused_by_the_driver(overrides: tuple[str, ...]) -> str:
    with pytest.raises(ExperimentError) as refused:
        load("digits", overrides)
    return str(refused.value).removeprefix("--set: ")


def refused_by_a_worker(overrides: tuple[str, ...], folder: Path) -> str:
    """What a worker says of a job that no driver has checked."""
    tree: dict[str, Any] = load("digits").experiment.stage("student", folder, {}, None).model_dump(mode="json")
    tree["data"]["loader_workers"] = 1
    for text in overrides:
        put(tree, *parse_override(text), text)
    with pytest.raises(ExperimentError) as refused:
        build(TrainConfig.model_validate(tree), Group(), Recorded(), no_telemetry)
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("scale.num_workers=3",), "data.global_batch_size 64 is not divisible by scale.num_workers 3: write 63 or 66"),
        (("data.val_resize=7",), "data.val_resize 7 is below data.image_size 8: write at least 8, or leave it out"),
        (("optim.accumulate=65",), "optim.accumulate 65 exceeds the 64 samples of one worker's batch"),
        (
            ("optim.accumulate=33", "scale.num_workers=2"),
            "optim.accumulate 33 exceeds the 32 samples of one worker's batch",
        ),
        (("data.device_augment.mixup=0.2", "data.global_batch_size=63"), "but each of 1 workers has 63 of"),
        (("data.device_augment.cutmix=0.2", "data.last_batch=short"), "which a short last batch may part"),
        (("data.device_augment.mixup=0.2", "teacher.service=1"), "teacher.service: it gives the logits of each image"),
        (("teacher.service=1", *GPU), "teacher.service: it is sent images that the host has decoded"),
        ((*GPU, "scale.use_gpu=false"), "data.decoder gpu works on GPUs only"),
        (("optim.warmup_epochs=12",), "optim.warmup_epochs 12 leaves no epoch of optim.epochs 12"),
        (("optim.nesterov=true", "optim.momentum=0"), "optim.nesterov needs optim.momentum above 0"),
        (("optim.accumulate=2", "distill.method=[sp]"), "distill.method: sp looks at all samples of a batch, which optim.accum"),
        (
            ("optim.accumulate=2", "distill.method=[pskd]", "scale.num_workers=2"),
            "distill.method: pskd gathers the outputs of all workers",
        ),
        (
            ("data.device_augment.mixup=0.2", "distill.method=[dkd]"),
            "distill.method: dkd needs images of one class each",
        ),
        (("teacher=null", "distill.method=[dkd]"), "distill.method: dkd needs a teacher: write teacher.model"),
    ],
)
def test_a_rule_is_checked_on_the_driver_and_again_by_the_worker(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    refused = refused_by_the_driver(overrides)
    assert message in refused
    assert refused_by_a_worker(overrides, tmp_path) == refused


@pytest.mark.parametrize(
    "overrides",
    [
        ("scale.num_workers=2", "data.global_batch_size=62"),
        ("data.val_resize=8",),
        ("optim.accumulate=32", "scale.num_workers=2"),
        ("data.device_augment.mixup=0.2", "data.global_batch_size=62"),
        ("data.global_batch_size=63", "data.last_batch=short"),
        ("data.device_augment.mixup=0.2", "distill.method=kd"),
        ("data.device_augment.mixup=0.2", "distill.method=at"),
        ("teacher.service=1", "data.global_batch_size=63"),
        GPU,
        (*GPU, "scale.use_gpu=true"),
        ("optim.warmup_epochs=11.9",),
        ("optim.nesterov=false", "optim.momentum=0"),
        ("optim.accumulate=2", "distill.method=pskd"),
        ("distill.method=pskd", "scale.num_workers=2"),
        ("distill.method=sp",),
        ("teacher=null", "distill.method=pskd"),
        ("sweep.policy=asha", "sweep.metric=top1_pct", "sweep.steps=null", "sweep.grace_epochs=4", "train.evaluate_every=2"),
        ("sweep.grace_epochs=3", "train.evaluate_every=2"),
        ("assistants=[{model: resnet8, epochs: 3}]", "optim.warmup_epochs=2", "teacher.epochs=3"),
        ("optim.name=dot", "optim.nesterov=false"),
        ("optim.name=dot", "optim.nesterov=false", "distill.method=none", "sweep.space.distill.method=[kd]"),
    ],
)
def test_what_is_just_within_a_rule_is_taken(overrides: tuple[str, ...]) -> None:
    load("digits", overrides)


def test_rows_of_all_workers_are_gathered_where_batches_are_whole() -> None:
    experiment = load("digits", ["scale.num_workers=2"]).experiment
    assert first_problem_of_method("pskd", load_method("pskd").requires, experiment) is None


def test_asha_needs_an_accuracy_after_its_grace_epochs() -> None:
    asha = ("sweep.policy=asha", "sweep.metric=top1_pct", "sweep.steps=null")
    refused = refused_by_the_driver((*asha, "sweep.grace_epochs=2", "train.evaluate_every=3"))
    assert refused.endswith("write 3, or train.evaluate_every 1")


def test_a_batch_is_as_large_as_the_training_split_at_most() -> None:
    assert enough_images(DataConfig(global_batch_size=10), 10) is None
    assert enough_images(DataConfig(global_batch_size=11, last_batch="short"), 10) is None
    assert enough_images(DataConfig(global_batch_size=11), 10) == (
        "data.global_batch_size: 11 is more than the 10 training images of digits; write at most 10, or data.last_batch=short"
    )


def test_the_recipe_keeps_every_rule() -> None:
    experiment = load("digits").experiment
    assert [rule(experiment) for rule in RULES] == [None] * len(RULES)
    assert len(METHOD_RULES) == 4
    assert {first_problem_of_method(name, load_method(name).requires, experiment) for name in METHODS} == {None}
