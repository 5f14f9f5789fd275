"""Probes and features of a checkpoint, whose classes need not be the data's, on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.trainables.data.photos import encoded, photo
from tests.trainables.jobs import write_able_teacher, write_teacher
from trainables.config import DataConfig, EvaluateConfig
from trainables.data.source import open_source
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.features import embed_checkpoint, load_tapped, probe_checkpoint
from trainables.errors import DataError, ModelError
from trainables.metrics.heartbeat import Heartbeat
from trainables.models.model_input import student_input
from trainables.models.pixels import take_pixels
from trainables.models.registry import build_model
from trainables.probes.features import Features
from trainables.probes.knn import knn


def settings(checkpoint: Path, **values: Any) -> EvaluateConfig:
    """On the digits in float64; `values` change that."""
    data = DataConfig(path="digits", image_size=8, loader_workers=1, global_batch_size=100)
    tree = {"checkpoint": str(checkpoint), "output": str(checkpoint.with_name("output.json")), "data": data, "precision": "fp64"}
    return EvaluateConfig.model_validate({**tree, **values})


def no_report(kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
    """The progress of nothing that is shown."""


def probed(group: Group, config: EvaluateConfig) -> dict[str, Any]:
    return probe_checkpoint(config, group, Heartbeat(), no_report)


def embedded(group: Group, config: EvaluateConfig) -> dict[str, Any]:
    return embed_checkpoint(config, group, Heartbeat(), no_report)


def digits_features(split: Any) -> Features:
    """The input of the last layer of mlp_large with seed 11, by a forward pass without it."""
    model = build_model("mlp_large", num_classes=3, image_size=8, seed=11).double().eval()
    model.head = torch.nn.Identity()
    take_pixels(model, student_input(DataConfig(image_size=8)))
    source = open_source(DataConfig(), split)
    images = torch.from_numpy(np.stack([np.asarray(source.read(index)) for index in range(len(source))])).permute(0, 3, 1, 2)
    with torch.no_grad():
        features_ND = model(images.double() / 255)
    return Features(features_ND, torch.from_numpy(np.array(source.labels_N)), torch.arange(len(source)))


def test_a_checkpoint_of_other_classes_is_probed_by_its_features_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    config = settings(tmp_path / "model.safetensors", measure="knn")
    write_teacher(Path(config.checkpoint), num_classes=3)
    (alone,) = ranks.run(1, probed, config)
    expected = knn(digits_features("train"), digits_features("val"), Group())
    assert {name: alone[name] for name in expected} == expected
    assert (alone["num_images"], alone["num_train_images"], alone["skipped"]) == (355, 1442, [])
    assert ranks.run(3, probed, config) == [alone] * 3


def test_a_linear_probe_of_able_features_is_better_than_of_random_ones(tmp_path: Path) -> None:
    config = settings(Path(write_able_teacher(tmp_path / "model.safetensors")), measure="linear")
    assert probed(Group(), config)["top1_pct"] > 95


def test_features_of_both_splits_are_a_table_of_one_row_an_image(ranks: RankPool, tmp_path: Path) -> None:
    for split, number in [("train", 0), ("train", 1), ("train", 2), ("val", 3), ("val", 4)]:
        (folder := tmp_path / "images" / split / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(b"no image" if number == 4 else encoded(photo(number, 8, 8), "PNG"))
    data = DataConfig(path=str(tmp_path / "images"), image_size=8, loader_workers=0, global_batch_size=2)
    config = settings(tmp_path / "model.safetensors", measure="embed", data=data, precision="fp32")
    write_teacher(Path(config.checkpoint), num_classes=3)
    written = []
    for world_size in (1, 2):
        result = ranks.run(world_size, embedded, config)[0]
        assert (result["num_images"], result["num_features"], result["skipped_images"]) == (4, 256, 1)
        assert result["skipped"][0].startswith("val/a/4.png (")
        written.append(pq.read_table(config.features_file).to_pydict())
    one, two = written
    assert one.pop("embedding") == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in two.pop("embedding")]
    assert one == two
    assert one["path"] == ["train/a/0.png", "train/a/2.png", "train/b/1.png", "val/b/3.png"]
    assert (one["split"], one["label"], one["class"]) == (["train"] * 3 + ["val"], [0, 0, 1, 1], ["a", "a", "b", "b"])


def test_a_split_without_one_readable_image_is_refused(tmp_path: Path) -> None:
    for split, label in [("train", "a"), ("train", "b"), ("val", "a")]:
        (folder := tmp_path / "images" / split / label).mkdir(parents=True)
        (folder / "0.png").write_bytes(b"no image" if split == "val" else encoded(photo(0, 8, 8), "PNG"))
    data = DataConfig(path=str(tmp_path / "images"), image_size=8, loader_workers=0, global_batch_size=2)
    config = settings(tmp_path / "model.safetensors", measure="knn", data=data)
    write_teacher(Path(config.checkpoint), num_classes=3)
    with pytest.raises(DataError, match="no image of the split val could be read"):
        probed(Group(), config)


def test_a_tap_that_is_no_vector_is_refused_with_one_that_is(tmp_path: Path) -> None:
    config = settings(tmp_path / "model.safetensors", measure="knn", tap="stage1")
    write_teacher(Path(config.checkpoint), "convnet_small")
    with pytest.raises(ModelError, match=r"the tap stage1 has the shape \(8, 8, 8\) per image, but must be a vector: use pooled"):
        load_tapped(config)
