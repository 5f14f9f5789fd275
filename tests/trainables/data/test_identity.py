"""What the data of a training is: the same wherever it lies and however it is read, another as soon as the images are."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.trainables.data.image_folder import write_images
from tests.trainables.data.packed import pack_here
from trainables.config import DataConfig, DataIdentity
from trainables.data.identity import check_same_data, data_identity
from trainables.data.source import open_on_node
from trainables.data.sources.memory import MemorySource
from trainables.errors import DataError


def identity_of(path: Path | str, **data: object) -> DataIdentity:
    config = DataConfig.model_validate({"path": str(path), **data})
    return data_identity(open_on_node(config, "train"), open_on_node(config, "val"))


def swap(one: Path, other: Path) -> None:
    os.rename(one, one.with_name("swapped"))
    os.rename(other, one)
    os.rename(one.with_name("swapped"), other)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an image more": (lambda train: shutil.copy(train / "a/0.png", train / "a/9.png"), "train had 8 images and has 9"),
    "an image less": (lambda train: (train / "b/0.png").unlink(), "train had 8 images and has 7"),
    "another name": (
        lambda train: os.rename(train / "a/0.png", train / "a/00.png"),
        "the names or order of the train images changed",
    ),
    "another class's image under the same name": (
        lambda train: swap(train / "a/1.png", train / "b/1.png"),
        "the contents of the train images changed",
    ),
    "an image of another class": (
        lambda train: os.rename(train / "a/0.png", train / "b/7.png"),
        "the labels and the names or order of the train images changed",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_images_that_changed_are_refused_with_what_changed_unless_that_is_accepted(change: str, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    before, (apply, changed) = identity_of(images), CHANGES[change]
    assert check_same_data("it", before, identity_of(shutil.copytree(images, tmp_path / "copy")), accept=False) == []
    apply(images / "train")
    after = identity_of(images)
    with pytest.raises(DataError, match=f"^it was trained on other data: {changed}: restore .* --out, .*--accept-new-data$"):
        check_same_data("it", before, after, accept=False)
    assert check_same_data("it", before, after, accept=True) == [changed]


def test_other_classes_are_refused_even_where_new_data_is_accepted(tmp_path: Path) -> None:
    before = identity_of(write_images(tmp_path / "ab"))
    others = {"abd": "class d is new", "a": "class b is gone", "acd": "classes c, d are new and class b is gone"}
    for classes, change in others.items():
        with pytest.raises(
            DataError, match=f"it was trained on other classes: {change}; .*--accept-new-data does not change that"
        ):
            check_same_data("it", before, identity_of(write_images(tmp_path / classes, classes=classes)), accept=True)


def test_opening_again_reads_the_same_data(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    assert identity_of(images) == identity_of(images)
    assert identity_of("digits") == identity_of("digits")


def test_a_packed_set_is_known_by_the_checksums_of_its_index(tmp_path: Path) -> None:
    found = []
    for name, num_train in (("one", 4), ("other", 5)):
        pack_here(write_images(tmp_path / name, num_train), tmp_path / f"{name}-packed")
        found.append(identity_of(tmp_path / f"{name}-packed"))
    for shard in (tmp_path / "one-packed").glob("*train*"):
        if "rows" not in shard.name:
            shard.write_bytes(bytes(shard.stat().st_size))
    assert identity_of(tmp_path / "one-packed") == found[0]  # no shard is read
    with pytest.raises(DataError, match="train had 8 images and has 10"):
        check_same_data("it", *found, accept=False)


def test_of_many_images_few_are_read() -> None:
    class Counted(MemorySource):
        num_reads = 0

        def read(self, index: int) -> np.ndarray:
            self.num_reads += 1
            return super().read(index)

    pixels_MHWC = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    source = Counted("many", classes=("a",), labels_N=np.zeros(100_000, dtype=np.int64), images_MHWC=pixels_MHWC)
    data_identity(source, source)
    assert source.num_reads <= 2 * 256


def test_a_further_set_that_changed_is_refused_as_the_first_is(tmp_path: Path) -> None:
    images, more = write_images(tmp_path / "images"), write_images(tmp_path / "more")
    data = {"more": [{"path": str(more), "share": 0.5}], "global_batch_size": 4}
    before = identity_of(images, **data)
    (more / "val/a/0.png").unlink()  # nothing reads its validation images
    assert check_same_data("it", before, identity_of(images, **data), accept=False) == []
    os.rename(more / "train/a/0.png", more / "train/a/00.png")
    with pytest.raises(DataError, match="the names or order of the train images changed"):
        check_same_data("it", before, identity_of(images, **data), accept=False)
