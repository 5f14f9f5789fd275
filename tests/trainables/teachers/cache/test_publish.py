"""A published cache is read by a program that knows nothing of this project: the targets and the images of the training."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.trainables.jobs import config, train, write_teacher
from tests.trainables.teachers.cache.test_cached_teacher import losses_of, ran_for
from tests.trainables.teachers.cache.test_fill import fill_alone
from trainables.config import FillConfig, TrainConfig
from trainables.device.augment import build_train_inputs
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build
from trainables.errors import DataError
from trainables.methods.contract import ModelOutputs
from trainables.teachers.cache import cached_teacher
from trainables.teachers.cache.cached_teacher import CachedTeachers
from trainables.teachers.interface import TeacherRequest

SIZE, IMAGES = 12, 24
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "crops, RandAugment and mixes": {
        "augment": "crop_flip",
        "fidelity": "exact",
        "device_augment": {
            "policy": {"name": "randaugment", "num_ops": 2, "magnitude": 9},
            "mixup": 0.4,
            "cutmix": 1.0,
            "random_erasing": 0.5,
        },
        "last_batch": "drop",
    },
    "padded crops and colors": {
        "augment": "pad_crop_flip",
        "device_augment": {
            "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "probability": 0.7},
            "grayscale": 0.3,
        },
    },
    "timm's operations": {
        "augment": "pad_crop_flip",
        "device_augment": {"policy": {"name": "randaugment_timm", "num_ops": 4, "magnitude": 3, "magnitude_std": 3}},
    },
    "none": {"augment": "none"},
}
INDEPENDENT = """
import sys
import torch
from read_targets import ReinforcedFolder, read_targets

images, folder, out = sys.argv[1:]
targets, about = read_targets(folder, 0)
dataset = ReinforcedFolder(images, folder, 0)
pixels = torch.stack([dataset[row][0] for row in range(len(dataset))])
assert not {name.partition(".")[0] for name in sys.modules} & {"trainables", "service"}
torch.save({"targets": targets, "pixels": pixels, "about": about}, out)
"""


def photos(root: Path) -> Path:
    """An image folder of ten classes, of smooth images of several sizes."""
    for number in range(IMAGES):
        small = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((20 + number % 3, 17 + number % 4), Image.Resampling.BICUBIC)
        for split in ("train", "val"):
            path = root / split / f"{number % 10}" / f"{number}.{('png', 'jpg')[number % 2]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    return root


def job(folder: Path, name: str, **sections: Any) -> TrainConfig:
    weights = folder / "teacher.safetensors"
    if not weights.exists():
        write_teacher(weights, image_size=SIZE)
    data = {"path": str(folder / "images"), "image_size": SIZE, "global_batch_size": 4, **sections.pop("data", {})}
    teacher = {"weights": str(weights), "cache": str(folder / "set"), **sections.pop("teacher", {})}
    job_config = config(folder / name, data=data, teacher=teacher, precision="fp32", **sections)
    return FillConfig.model_validate({**job_config.model_dump(), "publish": True}) if name == "fill" else job_config


def read_alone(folder: Path) -> dict[str, Any]:
    """What a program reads that has this folder's own reader alone."""
    (of_teacher,) = [path for path in folder.joinpath("set").iterdir() if (path / "images.txt").exists()]
    script, out = folder / "set" / "independent.py", folder / "read.pt"
    script.write_text(INDEPENDENT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [sys.executable, str(script), str(folder / "images"), str(of_teacher), str(out)]
    subprocess.run(arguments, check=True, cwd=folder / "set", env=environment)
    read: dict[str, Any] = torch.load(out)
    return read


def trained_on(settings: TrainConfig) -> dict[int, tuple[ModelOutputs, Tensor]]:
    """Sample → the outputs and the pixels with which a training that reads the cache learns in its first epoch."""
    job, found = build(settings, Group(), lambda *_: None, lambda whole=False: {}), {}
    teacher, prepare = job.train_state.teacher, build_train_inputs(settings, Group().device)
    assert isinstance(teacher, CachedTeachers)
    for batch in on_device(job.train_loader.epoch(0), Group().device):
        prepared = prepare(batch)
        request = TeacherRequest(batch.host_indices_B, 0, prepared.mix and prepared.mix.partners_B)
        (outputs,) = teacher(prepared.images_BCHW, len(batch.labels_B), request).values()
        for row, sample in enumerate(batch.host_indices_B.tolist()):
            found[sample] = outputs.map(lambda values, row=row: values[row]), prepared.images_BCHW[row]
    assert teacher.teachers[0].network is None
    job.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_a_program_of_others_reads_the_targets_bit_for_bit_and_the_images_within_a_level(
    tmp_path: Path, augmentation: str
) -> None:
    photos(tmp_path / "images")
    data = AUGMENTATIONS[augmentation]
    top_k = 3 if augmentation != "none" else None
    settings = {"data": data, "teacher": {"cache_top_k": top_k}}
    fill_alone(Group(), job(tmp_path, "fill", **settings))
    read, expected = read_alone(tmp_path), trained_on(job(tmp_path, "train", **settings))
    targets = read["targets"]
    assert targets["sample"].tolist() == sorted(expected)
    assert len(expected) == IMAGES
    logits_NK = torch.stack([expected[sample][0].logits_BK for sample in sorted(expected)])
    assert torch.equal(targets["logits"], logits_NK)
    pixels = torch.stack([expected[sample][1] for sample in sorted(expected)])
    off = (read["pixels"] - pixels).abs() * 255
    assert off.max() < 1.01
    assert off.mean() < 0.02
    assert read["about"]["classes"] == [f"{number}" for number in range(10)]
    assert read["about"]["images"]["seed"] == (3 if augmentation != "none" else None)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["float16", "fp8"])
def test_features_are_read_bit_for_bit_too(tmp_path: Path, dtype: str) -> None:
    photos(tmp_path / "images")
    settings: dict[str, Any] = {"data": AUGMENTATIONS["padded crops and colors"], "teacher": {"cache_feature_dtype": dtype}}
    settings["distill"] = {"method": ["rkd"], "options": {}}
    fill_alone(Group(), job(tmp_path, "fill", **settings))
    targets, expected = read_alone(tmp_path)["targets"], trained_on(job(tmp_path, "train", **settings))
    (name,) = [name for name in targets if name.startswith("feature ")]
    features = torch.stack([expected[sample][0].features[0] for sample in sorted(expected)])
    assert torch.equal(targets[name], features)


def test_workers_publish_the_same_files_and_a_set_is_a_cache(tmp_path: Path, ranks: RankPool) -> None:
    contents = []
    for number, workers in enumerate((1, 2)):
        folder = tmp_path / str(number)
        photos(folder / "images")
        data = AUGMENTATIONS["crops, RandAugment and mixes"]
        settings = {"data": data, "teacher": {"cache_epochs": 2}, "optim": {"epochs": 3}}
        for _ in range(2):  # again, where all is there
            ranks.run(workers, fill_alone, job(folder, "fill", **settings))
        files = sorted(folder.joinpath("set").glob("*/epoch-*/augmentation.arrow"))
        assert [file.parent.name for file in files] == ["epoch-00000", "epoch-00001"]
        contents.append([file.read_bytes() for file in files])
        before = {path: path.stat().st_mtime_ns for path in folder.joinpath("set").rglob("*")}
        first, second = (train(Group(), job(folder, name, **settings)) for name in ("first", "second"))
        assert before == {path: path.stat().st_mtime_ns for path in folder.joinpath("set").rglob("*")}
        assert [ran_for(first), ran_for(second)] == [[0, 0, 0], [0, 0, 0]]
        assert losses_of(first) == losses_of(second)
        card = folder.joinpath("set", "README.md").read_text()
        assert "| mlp_large | 24 | 2 | logits 10 |" in card
    assert contents[0] == contents[1]


def test_a_disk_without_room_for_both_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(tmp_path / "images")
    settings = {"data": AUGMENTATIONS["crops, RandAugment and mixes"]}
    row_bytes = 4 + 4 + 4 + 2 * 10
    monkeypatch.setattr(cached_teacher, "free_bytes", lambda path: IMAGES * row_bytes)
    with pytest.raises(DataError, match=r"teacher.cache: 1.52 KiB of logits 10 do not fit into the 768 bytes that are free"):
        fill_alone(Group(), job(tmp_path, "fill", **settings))
    assert not [path for path in tmp_path.joinpath("set").rglob("*") if path.is_file()]
