"""The shipped recipes: their models exist at full size, and each trains, with models of fewer layers, on tiny images."""

from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from service.config.experiment import load
from service.config.files import recipes
from tests.trainables.jobs import train, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.models.registry import construct

SIZE = 32
TINY = [
    "data.path=synthetic",
    "data.synthetic_images=24",
    "data.synthetic_classes=10",
    f"data.image_size={SIZE}",
    f"data.val_resize={SIZE}",
    "data.global_batch_size=6",
    "data.loader_workers=1",
    "precision=fp32",
    "train.warmup_steps=1",
    "train.max_steps=1",
]
VIT = "{depth: 1, embed_dim: 16, num_heads: 2, mlp_ratio: 4}"
RESNET = "{layers: [1, 1, 1, 1], drop_path_rate: 0.05}"
SHALLOW = {
    "backbone": [f"teacher.args={VIT}", "data.augment=none"],
    "deit_distilled": [
        "teacher.model=timm/regnety_002",
        "student.args={depth: 2, embed_dim: 16, num_heads: 2, drop_path_rate: 0.1}",
    ],
    "finetune": ["student.weights=null"],
    "funmatch_r50": ["teacher.model=timm/resnetv2_50x1_bit"],
    "radio_small": [
        "teachers=["
        + ", ".join(
            f"{{model: timm/{model}, args: {VIT}, weights: x, image_size: 28}}"
            for model in ("vit_huge_patch14_clip_quickgelu_378", "vit_giant_patch14_reg4_dinov2")
        )
        + "]",
        f"student.args={VIT}",
    ],
    "reinforced_r50d": [
        "teachers=["
        + ", ".join(f"{{model: timm/resnext101_32x{width}d, args: {{layers: [1, 1, 1, 1]}}, weights: x}}" for width in (8, 16))
        + "]",
        "student.args={layers: [1, 1, 1, 1]}",
    ],
    "rsb_a1": [f"student.args={RESNET}"],
    "rsb_a2": [f"student.args={RESNET}"],
    "rsb_a3": [f"student.args={RESNET}", "train.progressive=[{epochs: 1, image_size: 16}]"],
    "tinyvit_21m": [
        f"teacher.args={VIT}",
        "student.args={depths: [1, 1, 1, 1], embed_dims: [16, 24, 32, 48], num_heads: [1, 1, 2, 2]}",
    ],
    "vanillakd_a2_r50": [f"teacher.args={VIT}", f"student.args={RESNET}"],
}
"""What is smaller than in the recipe, so that two steps take a second."""


def untrained(name: str, folder: Path) -> TrainConfig:
    """The student's stage of a recipe with tiny images, shallow models and teachers that were not trained."""
    cached = [f"teacher.cache={folder / 'cache'}"] if name == "tinyvit_21m" else []
    experiment = load(name, [*TINY, *SHALLOW.get(name, ()), *cached]).experiment
    given = [
        each.model_copy(update={"weights": write_teacher(folder / f"{n}.safetensors", each.model, 10, each.image_size or SIZE)})
        for n, each in enumerate(experiment.all_teachers)
    ]
    taught: dict[str, BaseModel | tuple[BaseModel, ...]] = {"teachers": tuple(given)} if experiment.teachers else {}
    if experiment.teacher is not None:
        taught = {"teacher": given[0]}
    return experiment.model_copy(update=taught).stage("student", folder / "out", {})


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_trains_as_it_is_written(name: str, tmp_path: Path) -> None:
    found = train(Group(), untrained(name, tmp_path))
    assert found["progress"].step == 2
    assert all(torch.isfinite(tensor).all() for tensor in found["state"].values())


@pytest.mark.parametrize("name", recipes())
def test_the_models_of_every_recipe_take_its_images_at_full_size(name: str) -> None:
    experiment = load(name).experiment
    sizes = {each.model: each.image_size or experiment.data.image_size for each in experiment.all_teachers}
    num_classes = 10 if experiment.data.labels else 0
    for model, size in {**sizes, experiment.student.model: experiment.data.image_size}.items():
        with torch.device("meta"):
            outputs = construct(model, num_classes=num_classes, image_size=size, seed=0).eval()(torch.zeros(2, 3, size, size))
        assert outputs.shape == (2, num_classes or outputs.shape[1])
