"""Layouts that training reads as they are: the same samples as their packed sets, in the same order."""

import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.trainables.data.image_folder import open_folder
from tests.trainables.data.pack.test_image_list import write_lists
from tests.trainables.data.pack.test_imagenet import write_kit, write_tars
from tests.trainables.data.packed import packed, write_tar
from tests.trainables.data.photos import MakeFolder
from tests.trainables.data.test_pack_readers import (
    JPEGS,
    write_cifar10,
    write_lmdb,
    write_parquet,
    write_tfrecords,
    write_webdataset,
)
from trainables.config import DataConfig
from trainables.data.decode import UnreadableImageError
from trainables.data.identity import fingerprint
from trainables.data.loader.loader import Loader
from trainables.data.source import check_placement, open_on_node, open_source
from trainables.errors import DataError


def write_list(root: Path) -> None:
    rows = {"train.csv": "images/b.jpg,x\nimages/a 0.jpg,y\n", "val.csv": "images/c.jpg,x\nimages/d.jpg,y\n"}
    write_lists(root, rows)


def write_imagenet(root: Path) -> None:
    write_kit(write_tars(root))


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "tars": write_webdataset,
    "cifar": write_cifar10,
    "records": write_tfrecords,
    "list": write_list,
    "imagenet": write_imagenet,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_its_packed_set_also_by_threads_and_after_pickling(tmp_path: Path, layout: str) -> None:
    root = tmp_path / layout
    LAYOUTS[layout](root)
    for split, expected in zip(("train", "val"), packed(root), strict=True):
        source = open_source(DataConfig(path=str(root)), "train" if split == "train" else "val")
        assert (source.classes, source.labels_N.tolist()) == (expected.classes, expected.labels_N.tolist())
        for opened in (source, pickle.loads(pickle.dumps(source))):
            order = list(range(len(source))) * 20
            with ThreadPoolExecutor(8) as pool:
                for index, sample in zip(order, pool.map(opened.read, order), strict=True):
                    assert np.array_equal(np.asarray(sample), np.asarray(expected.read(index)))
                    assert opened.name(index) == expected.name(index)


def test_a_split_goes_to_another_process_without_the_other_split(tmp_path: Path) -> None:
    write_list(tmp_path)
    train = open_source(DataConfig(path=str(tmp_path)), "train")
    assert b"images/b.jpg" in pickle.dumps(train)
    assert b"images/c.jpg" not in pickle.dumps(train)


@pytest.mark.parametrize("layout", ["tars", "cifar"])
def test_a_loader_takes_a_layouts_images(tmp_path: Path, layout: str) -> None:
    LAYOUTS[layout](tmp_path / layout)
    data = DataConfig(path=str(tmp_path / layout), image_size=32, global_batch_size=4)
    loader = Loader(open_on_node(data, "train"), data, split="train", seed=0, rank=0, world_size=1, loader_workers=2)
    try:
        batch = next(loader.epoch(0))
        assert batch.images_BCHW.shape == (4, 3, 32, 32)
    finally:
        loader.close()


def write_environments(root: Path) -> None:
    write_lmdb(root, {b"a/0": JPEGS[0]}, {b"a/0": JPEGS[0]})


@pytest.mark.parametrize("write", [write_parquet, write_environments])
def test_a_layout_without_random_access_is_refused_with_the_line_that_packs_it(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    root = tmp_path / "my set"
    write(root)
    with pytest.raises(DataError, match=r"^data.path: ") as caught:
        open_source(DataConfig(path=f"{root}/"), "train")
    assert f"run `distill pack '{root}/' '{root}-packed'` and write data.path: '{root}-packed'" in str(caught.value)


def test_a_readers_refusal_names_the_key(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", [("0.jpg", JPEGS[0])])
    write_tar(tmp_path / "val.tar", [])
    with pytest.raises(DataError, match=r"^data.path: .*train.tar: the sample 0 has no .cls"):
        open_source(DataConfig(path=str(tmp_path)), "train")


def test_an_image_folder_is_read_as_one_whatever_lies_next_to_its_splits(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1, "b": 1}, val={"a": 1, "b": 1})
    write_tar(root / "train.tar", [])
    (root / "train.csv").write_text("train/a/000.jpg,a\n")
    assert open_folder(root, "train").name(0).startswith("train/")


def test_a_fingerprint_is_of_locations_labels_and_content(tmp_path: Path) -> None:
    def found(folder: Path) -> str:
        return fingerprint(open_source(DataConfig(path=str(folder)), "train"))

    root = tmp_path / "tars"
    write_webdataset(root)
    before = found(root)
    shutil.copytree(root, tmp_path / "copy")
    assert found(tmp_path / "copy") == before
    tar = root / "imagenet-train-000.tar"
    whole = tar.read_bytes()
    for old, new in ((JPEGS[0], JPEGS[0][:-9] + b"different"), (b"1\n", b"0\n")):
        tar.write_bytes(whole.replace(old, new))
        assert found(root) != before


def test_a_stage_is_refused_as_for_a_folder(tmp_path: Path) -> None:
    path = str(tmp_path / "tars")
    write_webdataset(tmp_path / "tars")
    with pytest.raises(DataError, match=r"^data.stage: .* is not a packed set; pack it with `distill pack`"):
        check_placement(DataConfig(path=path, stage="ram"))


def test_a_sample_that_was_cut_off_is_unreadable_and_a_missing_file_an_error(tmp_path: Path) -> None:
    write_webdataset(tmp_path / "tars")
    source = open_source(DataConfig(path=str(tmp_path / "tars")), "train")
    tar = tmp_path / "tars" / "imagenet-train-000.tar"
    tar.write_bytes(tar.read_bytes()[:3000])
    with pytest.raises(UnreadableImageError, match="truncated"):
        source.read(1)
    tar.unlink()
    with pytest.raises(FileNotFoundError):
        source.read(0)
