"""What makes two data sets, or two teachers, one and the same to a cache."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.trainables.data.packed import pack_here
from tests.trainables.jobs import config, write_teacher
from trainables.config import DataConfig
from trainables.data import identity
from trainables.data.decode import UnreadableImageError
from trainables.data.loader.loader import Loader
from trainables.data.pack import layout_reader
from trainables.data.pack.modes import Mode
from trainables.data.source import open_source
from trainables.distributed.group import Group
from trainables.models.registry import build_model
from trainables.models.weights import teacher_sha256
from trainables.teachers.cache import key
from trainables.teachers.cache.key import ImageSet, cache_key, check_same_data, key_parts
from trainables.teachers.rows import RowFormat


def folder(root: Path, seed: int = 0) -> Path:
    """An image folder of two classes with three images each; those of another seed have other pixels and equal sizes."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(3):
                pixels = np.random.default_rng([seed, number]).integers(0, 256, (9, 9, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png", compress_level=0)
    return root


def fingerprint(path: Path | str, **data: object) -> str:
    return identity.fingerprint(open_source(DataConfig.model_validate({"path": str(path), **data}), "train"))


def test_a_folder_is_its_names_sizes_and_contents_wherever_it_lies(tmp_path: Path) -> None:
    images = folder(tmp_path / "images")
    first = fingerprint(images)
    copy = shutil.copytree(images, tmp_path / "copy")
    os.utime(copy / "train" / "cat" / "0.png", (0, 0))
    assert fingerprint(copy) == first
    os.rename(images / "train" / "cat" / "0.png", images / "train" / "cat" / "00.png")
    renamed = fingerprint(images)
    with open(images / "train" / "dog" / "2.png", "ab") as file:
        file.write(b"longer")
    assert len({first, renamed, fingerprint(images)}) == 3


def test_images_preprocessed_anew_are_other_images_though_their_sizes_are_equal(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one", 0), folder(tmp_path / "other", 1)
    sizes = [[path.stat().st_size for path in sorted(root.rglob("*.png"))] for root in (one, other)]
    assert sizes[0] == sizes[1]
    assert fingerprint(one) != fingerprint(other)


def test_of_many_files_a_few_are_read_and_they_are_spread_over_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "SAMPLED", 4)
    images, prints = folder(tmp_path / "images"), list[str]()
    files = sorted((images / "train").rglob("*.png"))
    for number in range(len(files)):
        before = files[number].read_bytes()
        files[number].write_bytes(bytes(len(before)))
        prints.append(fingerprint(images))
        files[number].write_bytes(before)
    first = fingerprint(images)
    assert [number for number, other in enumerate(prints) if other != first] == [0, 1, 3, 4]
    files[2].write_bytes(b"shorter")  # the sizes of all count
    assert fingerprint(images) != first


def test_a_file_that_cannot_be_read_is_part_of_what_a_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training skips it, and does not end because its logits are cached."""
    images = folder(tmp_path / "images")
    first = fingerprint(images)

    def forbid(path: str) -> bytes:
        raise UnreadableImageError("cannot be read: Permission denied")

    monkeypatch.setattr(layout_reader, "read_file", forbid)
    assert fingerprint(images) != first


def test_a_packed_set_is_its_pixels_and_not_its_sizes(tmp_path: Path) -> None:
    names = ("first", "again", "other")
    for name, seed in zip(names, (0, 0, 1), strict=True):
        pack_here(folder(tmp_path / f"{name}-images", seed), tmp_path / name, Mode(raw=8))
    first, again, other = (fingerprint(tmp_path / name) for name in names)
    assert first == again != other


def test_sources_in_memory_are_their_pixels_and_their_number() -> None:
    assert fingerprint("digits") == fingerprint("digits")
    prints = [fingerprint("synthetic", synthetic_images=n, image_size=s) for n, s in ((100, 8), (101, 8), (100, 9))]
    assert len(set(prints)) == 3


def test_a_teacher_is_its_tensors_whatever_file_they_come_from(tmp_path: Path) -> None:
    def digest(path: Path) -> str:
        classes = [str(i) for i in range(10)]
        return teacher_sha256("mlp_large", str(path), image_size=8, classes=classes, seed=0)

    ours = Path(write_teacher(tmp_path / "ours.safetensors"))
    state = build_model("mlp_large", num_classes=10, image_size=8, seed=11).state_dict()
    save_file({f"module.{name}": tensor.clone() for name, tensor in state.items()}, tmp_path / "plain.safetensors")
    torch.save({"state_dict": state}, tmp_path / "pickled.pt")
    assert digest(ours) == digest(tmp_path / "plain.safetensors") == digest(tmp_path / "pickled.pt")
    next(iter(state.values())).view(-1)[0] += 1e-6
    torch.save(state, tmp_path / "nearly.pt")
    assert digest(tmp_path / "nearly.pt") != digest(ours)


def test_a_key_does_not_depend_on_the_order_of_its_parts() -> None:
    assert cache_key({"a": 1, "b": {"c": 2, "d": None}}) == cache_key({"b": {"d": None, "c": 2}, "a": 1})
    assert cache_key({"a": 1}) != cache_key({"a": 2})


IMAGES = ImageSet(num_samples=6, fingerprint="these", decoder="pil")
TEN = tuple(str(label) for label in range(10))


def parts(
    weights: Path,
    images: ImageSet = IMAGES,
    classes: Sequence[str] = TEN,
    top_k: int | None = None,
    row_format: RowFormat | None = None,
    model: str = "convnet_large",
    teacher: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The key's parts of a job; `changes` of its data, seed or precision."""
    sections = {name: changes.pop(name) for name in ("seed", "precision") if name in changes}
    data = {"augment": "pad_crop_flip", **changes}
    about = {"model": model, "weights": str(weights), **(teacher or {})}
    job = config(weights.parent / "job", teacher=about, data=data, **sections)
    return key_parts(job, images, classes, row_format or RowFormat(len(classes), top_k))


def leaves(parts_of_key: dict[str, Any]) -> dict[str, Any]:
    """The parts by their dotted names."""
    found = dict[str, Any]()
    for name, value in parts_of_key.items():
        found |= {f"{name}.{inner}": part for inner, part in value.items()} if isinstance(value, dict) else {name: value}
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that say neither of which model they are nor of which classes."""
    path = tmp_path_factory.mktemp("weights") / "plain.safetensors"
    save_file(build_model("convnet_large", num_classes=10, image_size=8, seed=11).state_dict(), path)
    return path


ALONE: dict[str, dict[str, Any]] = {
    "teacher.model": {"model": "convnet-large"},
    "teacher.precision": {"precision": "fp32"},
    "data.samples": {"images": IMAGES._replace(num_samples=7)},
    "data.fingerprint": {"images": IMAGES._replace(fingerprint="others")},
    "images.decoder": {"images": IMAGES._replace(decoder="turbojpeg")},
    "images.seed": {"seed": 4},
    "images.image_size": {"image_size": 9, "teacher": {"image_size": 8}},
    "images.augment": {"augment": "crop_flip"},
    "images.min_crop_area": {"min_crop_area": 0.14},
    "images.device_augment": {"device_augment": {"grayscale": 0.25}},
    "images.fidelity": {"fidelity": "exact"},
    "images.val_resize": {"val_resize": 10},
    "input.image_size": {"teacher": {"image_size": 9}},
    "input.mean": {"mean": (0.5, 0.456, 0.406)},
    "input.std": {"teacher": {"std": (0.229, 0.224, 0.5)}},
    "top_k": {"top_k": 3},
}
MAPS = (("embedding", (64,)), ("map", (64, 2, 2)))


@pytest.mark.parametrize("part", ALONE)
def test_each_part_of_a_key_changes_it_alone(plain: Path, part: str) -> None:
    first, other = parts(plain), parts(plain, **ALONE[part])
    before, after = leaves(first), leaves(other)
    assert {name for name in before if before[name] != after[name]} == {part}
    assert cache_key(first) != cache_key(other)


def test_a_key_has_no_other_parts(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = parts(plain)
    assert leaves(first).keys() == {
        *ALONE,
        "teacher.sha256",
        "teacher.num_classes",
        "input.interpolation",
        "images.erased_to",
        "images.partners",
        "format",
    }
    mixed = {"device_augment": {"mixup": 0.5}}
    assert cache_key(parts(plain, **mixed)) != cache_key(parts(plain, shuffle="none", **mixed))
    assert parts(plain) == parts(plain, shuffle="none")
    erased = {"device_augment": {"random_erasing": 0.5}, "teacher": {"mean": (0.5,) * 3}}
    assert cache_key(parts(plain, **erased)) != cache_key(parts(plain, mean=(0.5, 0.456, 0.406), **erased))
    save_file(build_model("convnet_large", num_classes=10, image_size=8, seed=12).state_dict(), tmp_path / "other.safetensors")
    assert parts(tmp_path / "other.safetensors")["teacher"]["sha256"] != first["teacher"]["sha256"]
    monkeypatch.setattr(key, "FORMAT", key.FORMAT + 1)
    assert cache_key(parts(plain)) != cache_key(first)


def test_the_teachers_own_precision_is_a_part_of_the_key_and_the_jobs_is_then_none(plain: Path) -> None:
    half, own = parts(plain, precision="bf16"), {"teacher": {"precision": "bf16"}}
    assert parts(plain, precision="fp32", **own) == half
    assert parts(plain, precision="bf16", teacher={"precision": "fp32"}) == parts(plain, precision="fp32") != half


def test_the_taps_are_a_part_of_the_key_of_features_alone(plain: Path) -> None:
    formats = (RowFormat(10, taps=MAPS), RowFormat(taps=MAPS), RowFormat(taps=MAPS[:1]), RowFormat(10))
    keys = [cache_key(parts(plain, row_format=each)) for each in formats]
    assert len(set(keys)) == 4
    assert "taps" not in parts(plain)  # logits that were cached before features could be are still found


def test_folders_with_equally_many_images_of_equal_sizes_have_keys_of_their_own(plain: Path, tmp_path: Path) -> None:
    def key_for(path: Path) -> str:
        data = DataConfig(path=str(path), global_batch_size=6, loader_workers=0)
        loader = Loader(open_source(data, "train"), data, split="train", seed=0, rank=0, world_size=1, loader_workers=0)
        return cache_key(parts(plain, check_same_data(data.path, loader, Group(), "teacher.cache")))

    for name, seed in (("one", 0), ("other", 1), ("again", 0)):
        folder(tmp_path / name, seed)
    assert key_for(tmp_path / "one") == key_for(tmp_path / "again") != key_for(tmp_path / "other")
