"""A teacher with class means classifies by the cosine to the mean feature of each class, the same on any number of workers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainables.data.image_folder import write_images
from tests.trainables.jobs import config, write_teacher
from trainables.config import DataConfig, TeacherConfig, TrainConfig
from trainables.data.source import open_source
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.engine.class_means import write_class_means
from trainables.errors import DataError
from trainables.metrics.heartbeat import Heartbeat
from trainables.models.class_embeddings import CLASS_EMBEDDINGS
from trainables.models.model_input import student_input
from trainables.models.pixels import take_pixels
from trainables.models.registry import build_model
from trainables.models.weights import begin_with, load_teacher, teacher_sha256


def job(folder: Path, weights: str, **sections: Any) -> TrainConfig:
    teacher = TeacherConfig(model="mlp_large", weights=weights, head="class_means", logit_scale=30.0)
    given = {"teacher": None, "distill": None, "model": "mlp_large", "weights": weights, "finetuned": teacher}
    return config(folder, **given, **sections)


def write(group: Group, settings: TrainConfig) -> dict[str, float]:
    return write_class_means(settings, group, Heartbeat())[1]


def load(path: Path, classes: tuple[str, ...] = tuple("0123456789"), **options: Any) -> torch.nn.Module:
    return load_teacher("mlp_large", str(path), image_size=8, classes=classes, seed=0, **options)


def test_logits_are_scaled_cosines_to_the_mean_feature_of_each_class_on_any_number_of_workers(
    tmp_path: Path, ranks: RankPool
) -> None:
    weights, means = write_teacher(tmp_path / "nine.safetensors", num_classes=9), list[torch.Tensor]()
    source = open_source(DataConfig(image_size=8), "train")
    pixels = np.stack([np.asarray(source.read(index)) for index in range(len(source))])
    images, labels = torch.from_numpy(pixels).permute(0, 3, 1, 2).double() / 255, torch.from_numpy(np.array(source.labels_N))
    model = build_model("mlp_large", num_classes=9, image_size=8, seed=11).double().eval()
    model.head = torch.nn.Identity()
    take_pixels(model, student_input(DataConfig(image_size=8)))
    features = model(images).detach()
    features = features / features.norm(dim=1, keepdim=True)
    expected = torch.stack([features[labels == label].mean(0) for label in range(10)])
    for world_size in (1, 2, 3):
        counts = ranks.run(world_size, write, job(tmp_path / str(world_size), weights, data={"global_batch_size": 60}))
        assert counts[-1] == {"num_images": 1442, "skipped_images": 0}
        path = tmp_path / str(world_size) / "checkpoints/best.safetensors"
        means.append(checkpoint.read(path)[0][CLASS_EMBEDDINGS])
        torch.testing.assert_close(means[-1], expected, rtol=0, atol=1e-9)
    teacher = load(path).double()
    take_pixels(teacher, student_input(DataConfig(image_size=8)))
    cosines = features @ (expected / expected.norm(dim=1, keepdim=True)).T
    torch.testing.assert_close(teacher(images), 30 * cosines)
    some = load(path, ("7", "2")).double()
    take_pixels(some, student_input(DataConfig(image_size=8)))
    torch.testing.assert_close(some(images), 30 * cosines[:, [7, 2]])
    assert teacher.state_dict().keys() == load(path, logits=False, classes=()).state_dict().keys()

    def key(path: Path) -> str:
        return teacher_sha256("mlp_large", str(path), image_size=8, classes=tuple("0123456789"), seed=0)

    tensors, about = checkpoint.read(path)
    changed = {**tensors, CLASS_EMBEDDINGS: tensors[CLASS_EMBEDDINGS].flip(0)}
    checkpoint.write_tensors(tmp_path / "other.safetensors", changed, about)
    assert key(path) != key(tmp_path / "other.safetensors")
    student = build_model("mlp_large", num_classes=10, image_size=8, seed=1)
    begin_with(student, "mlp_large", str(path), image_size=8, classes=tuple("0123456789"), seed=1, weights_key=None)
    assert torch.equal(student.state_dict()["hidden.0.weight"], tensors["model.hidden.0.weight"])


def test_a_class_without_a_readable_training_image_is_refused_in_one_line(tmp_path: Path) -> None:
    weights, folder = write_teacher(tmp_path / "t.safetensors"), write_images(tmp_path / "images", classes="abc")
    for path in (folder / "train/b").iterdir():
        path.write_bytes(b"no image")
    data = {"path": str(folder), "max_bad": 0.9, "global_batch_size": 4}
    with pytest.raises(
        DataError, match=r"has no readable training image of b, but teacher.head: class_means needs one per class: [^\n]+$"
    ):
        write(Group(), job(tmp_path / "out", weights, data=data))
