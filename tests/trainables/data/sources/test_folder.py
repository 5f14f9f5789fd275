import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from tests.trainables.data.photos import MakeFolder, photo
from trainables.config import DataConfig
from trainables.data.decode import decode_image
from trainables.data.loader.loader import Loader
from trainables.data.source import open_source
from trainables.data.sources.folder import EXTENSIONS, FolderSource
from trainables.errors import DataError


def _agrees_with_imagefolder(source: FolderSource, root: Path, split: str) -> None:
    theirs = ImageFolder(str(root / split), allow_empty=True)
    assert [str(root / source.name(index)) for index in range(len(source))] == [path for path, _ in theirs.samples]
    assert source.labels_N.tolist() == [label for _, label in theirs.samples]


def test_classes_and_samples_are_imagefolders(make_folder: MakeFolder) -> None:
    root = make_folder(train={"b": 2, "B": 1, "a10": 1, "a9": 1, "ä": 1, "a": 2}, val={"a": 1, "b": 2})
    for nested in ("train/a/deep/er", "train/a/deep-er", "train/a/Deep"):
        (root / nested).mkdir(parents=True)
        photo(1).save(root / nested / "x.PNG")
    (root / "train" / "a" / "notes.txt").write_text("not an image")
    (root / "train" / ".DS_Store").write_text("not a class")
    (root / "elsewhere").mkdir()
    photo(2).save(root / "elsewhere" / "linked.webp")
    os.symlink(root / "elsewhere", root / "train" / "a" / "link")
    os.symlink(root / "elsewhere", root / "train" / "c")
    source = FolderSource(str(root), "train")
    assert source.classes == tuple(ImageFolder(str(root / "train")).classes) == ("B", "a", "a10", "a9", "b", "c", "ä")
    _agrees_with_imagefolder(source, root, "train")
    assert source.labels_N.dtype == np.int64


def test_extensions_are_torchvisions() -> None:
    assert set(EXTENSIONS) == set(IMG_EXTENSIONS)


def test_an_image_is_read_as_pil_reads_it(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 2}, val={"cat": 1})
    source = open_source(DataConfig(path=str(root)), "train")
    expected = ImageFolder(str(root / "train"))
    assert [decode_image(source.read(index)).tobytes() for index in range(2)] == [image.tobytes() for image, _ in expected]


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_the_validation_folder_has_one_of_three_names(make_folder: MakeFolder, name: str) -> None:
    root = make_folder(train={"cat": 1, "dog": 1}, **{name: {"dog": 2}})
    source = FolderSource(str(root), "val")
    assert source.name(0) == f"{name}/dog/000.jpg"


def test_the_first_of_the_three_names_wins(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 1}, test={"cat": 3}, validation={"cat": 2})
    assert len(FolderSource(str(root), "val")) == 2


def test_a_class_that_validation_lacks_keeps_its_label(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1, "b": 1, "c": 1}, val={"c": 2})
    source = FolderSource(str(root), "val")
    assert source.classes == ("a", "b", "c")
    assert source.labels_N.tolist() == [2, 2]
    (root / "val" / "a").mkdir()
    assert FolderSource(str(root), "val").labels_N.tolist() == [2, 2]


def test_a_class_that_only_validation_has_is_refused_by_name(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1}, val={"a": 1, "zebra": 1})
    FolderSource(str(root), "train")
    with pytest.raises(DataError, match="zebra"):
        FolderSource(str(root), "val")


def test_bad_folders_are_refused_in_one_line(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1}, val={"a": 1})

    def message(split: str, path: Path = root) -> str:
        with pytest.raises(DataError) as caught:
            FolderSource(str(path), split)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "does not exist; write digits, synthetic" in message("train", root / "absent")
    assert "is a file" in message("train", root / "train" / "a" / "000.jpg")
    assert "no folder train" in message("train", root / "val")
    (root / "train" / "empty").mkdir()
    assert "train/empty holds no images" in message("train")
    (root / "train" / "empty").rmdir()
    (root / "val" / "a" / "000.jpg").rename(root / "val" / "a" / "000.txt")
    assert "val holds no images" in message("val")
    shutil.rmtree(root / "val")
    assert "no validation folder" in message("val")
    shutil.rmtree(root / "train" / "a")
    photo(1).save(root / "train" / "flat.jpg")
    assert "no class folders" in message("train")
    assert "no folder train" in message("val", root / "train")


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("train/a/up", ".."),
        ("train/a/deep/up", "../.."),
        ("train/all", "."),
        ("train/a/root", "../.."),
        ("train/a/parent", "../../.."),
        ("train/a/everything", "/"),
        ("train/c", "/"),
    ],
)
def test_a_link_to_a_folder_that_it_lies_in_is_refused_by_name(make_folder: MakeFolder, link: str, target: str) -> None:
    root = make_folder(train={"a": 2, "b": 1}, val={"a": 1})
    (root / "train/a/deep").mkdir()
    (root / link).symlink_to(target)
    real = os.path.realpath(root / link)
    with pytest.raises(DataError) as caught:
        FolderSource(str(root), "train")
    text = f"data.path: {root / link} is a link to {real}, in which it lies: its images would count again and again; "
    assert str(caught.value) == f"{text}remove the link"


def test_links_that_lead_to_each_other_or_to_themselves_end(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder(train={"a": 1, "b": 1}, val={"a": 1})
    (root / "train/a/b").symlink_to("../b")
    (root / "train/b/a").symlink_to("../a")
    with pytest.raises(DataError, match=r"train/a/b/a is a link to \S+/train/a, in which it lies"):
        FolderSource(str(root), "train")
    for link in ("train/a/b", "train/b/a"):
        (root / link).unlink()
    for name in "xy":
        (root / "train/a" / name).symlink_to(".")
    with pytest.raises(DataError, match="in which it lies"):
        FolderSource(str(root), "train")
    for name in "xy":
        (root / "train/a" / name).unlink()
    (tmp_path / "elsewhere/cats").mkdir(parents=True)
    photo(1).save(tmp_path / "elsewhere/cats/0.png")
    (tmp_path / "elsewhere/cats/up").symlink_to("..")
    (root / "train/cats").symlink_to(tmp_path / "elsewhere/cats")
    with pytest.raises(DataError, match=r"train/cats/up is a link to .*elsewhere, in which it lies"):
        FolderSource(str(root), "train")


def test_links_that_lead_elsewhere_are_followed(make_folder: MakeFolder, tmp_path: Path) -> None:
    real = make_folder(train={"a": 2, "b": 1}, val={"a": 1})
    root = tmp_path / "linked"
    root.mkdir()
    (root / "train").symlink_to(real / "train")
    (root / "val").symlink_to("train")
    (real / "train/a/more").symlink_to("../b")
    (real / "train/a/broken.jpg").symlink_to("broken.jpg")
    _agrees_with_imagefolder(FolderSource(str(root), "train"), root, "train")
    _agrees_with_imagefolder(FolderSource(str(root), "val"), root, "val")


@pytest.mark.skipif(sys.platform != "linux", reason="the first page of /proc/self/mem is a disk that fails")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_disk_that_fails_ends_the_epoch_with_the_samples_name(make_folder: MakeFolder, workers: int) -> None:
    root = make_folder(train={"a": 1}, val={"a": 3})
    (root / "val" / "a" / "001.jpg").unlink()
    (root / "val" / "a" / "001.jpg").symlink_to("/proc/self/mem")
    config = DataConfig(path=str(root), image_size=32, global_batch_size=2, max_bad=0.9)
    loader = Loader(open_source(config, "val"), config, split="val", seed=0, rank=0, world_size=1, loader_workers=workers)
    with pytest.raises(DataError, match=r"^data.path: val/a/001.jpg cannot be read: Input/output error; see to the disk"):
        list(loader.epoch(0))
    loader.close()


def test_a_name_that_is_not_text_can_be_read_and_printed(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1}, val={"a": 1})
    os.rename(root / "train/a/000.jpg", os.fsencode(root / "train/a") + b"/\xff\xfe.jpg")
    source = FolderSource(str(root), "train")
    source.name(0).encode()
    assert decode_image(source.read(0)).mode == "RGB"
