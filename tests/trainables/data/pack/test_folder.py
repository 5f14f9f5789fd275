import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from tests.trainables.data.image_folder import open_folder
from tests.trainables.data.photos import MakeFolder, photo
from trainables.config import DataConfig
from trainables.data.decode import decode_image
from trainables.data.interface import Source
from trainables.data.loader.loader import Loader
from trainables.data.order import Split
from trainables.data.pack.image_folders import EXTENSIONS
from trainables.data.pack.layout_reader import Listing
from trainables.data.pack.readers.folder import FolderReader
from trainables.data.source import open_source
from trainables.data.split_names import SPLIT_NAMES
from trainables.errors import DataError, NoLabelsError
from trainables.notices import notices_to


def _listed(root: Path, val_share: float | None = None) -> Listing:
    return FolderReader(root, val_share=val_share).listing()


def _agrees_with_imagefolder(source: Source, root: Path, split: str) -> None:
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
    (root / "other").mkdir()
    photo(3).save(root / "other" / "x.webp")
    os.symlink(root / "other", root / "train" / "c")
    source = open_folder(root, "train")
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


@pytest.fixture
def notices() -> Iterator[list[str]]:
    """What the test's code tells the user."""
    lines: list[str] = []
    with notices_to(lines.append):
        yield lines


def message(path: Path, split: Split = "train") -> str:
    """Why a folder is refused, in one line."""
    with pytest.raises(DataError) as caught:
        open_folder(path, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("train", "val"), [("train", "val"), ("Train", "Validation"), ("training", "valid"), ("TRAIN", "dev")])
def test_the_two_folders_may_have_the_names_that_data_sets_give_them(make_folder: MakeFolder, train: str, val: str) -> None:
    root = make_folder(**{train: {"cat": 1, "dog": 1}, val: {"dog": 2}})
    assert open_folder(root, "train").name(0) == f"{train}/cat/000.jpg"
    assert open_folder(root, "val").name(0) == f"{val}/dog/000.jpg"


def test_a_test_folder_validates_only_where_there_is_no_other_and_is_named(make_folder: MakeFolder, notices: list[str]) -> None:
    root = make_folder(train={"cat": 1}, test={"cat": 3}, valid={"cat": 2})
    assert len(open_folder(root, "val")) == 2
    shutil.rmtree(root / "valid")
    assert len(open_folder(root, "val")) == 3
    assert notices[0] == f"{root}: valid is the validation set; test is not used"
    assert notices[1].startswith(f"{root}: test is the validation set, since there is no val")


def test_two_folders_that_could_be_the_same_split_are_refused(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 1}, val={"cat": 3}, Valid={"cat": 2})
    assert (
        message(root) == f"data.path: {root} has val and Valid, which both mean the validation set: rename or remove one of them"
    )


def test_hidden_files_and_folders_are_no_classes_and_no_images(make_folder: MakeFolder, notices: list[str]) -> None:
    root = make_folder(train={"cat": 1, "dog": 1}, val={"cat": 1, "dog": 1})
    left = (root / "__MACOSX/train", root / "train/.ipynb_checkpoints", root / "train/@eaDir", root / "train/lost+found")
    for folder in (*left, root / "train/cat/.ipynb_checkpoints", root / "val/.cache"):
        folder.mkdir(parents=True)
        photo(1).save(folder / "x.jpg")
    for name in ("._000.jpg", ".DS_Store", "Thumbs.db"):
        (root / "train/cat" / name).write_bytes(b"x")
    source = open_folder(root, "train")
    assert (source.classes, [source.name(index) for index in range(len(source))], len(open_folder(root, "val"))) == (
        ("cat", "dog"),
        ["train/cat/000.jpg", "train/dog/000.jpg"],
        2,
    )
    assert not notices


def test_files_that_are_left_out_are_counted_by_their_ending_in_one_line(make_folder: MakeFolder, notices: list[str]) -> None:
    root = make_folder(train={"cat": 1, "dog": 1}, val={"cat": 1})
    for name in ("a.jfif", "b.JFIF", "c.gif", "deep/d.jfif", "README"):
        (root / "train/cat" / name).parent.mkdir(exist_ok=True)
        (root / "train/cat" / name).touch()
    (root / "train/stray.png").touch()
    (root / "train/dog/more").symlink_to("/not/mounted")
    for split in ("train", "val"):
        assert len(open_folder(root, split)) == (2 if split == "train" else 1)  # type: ignore[arg-type]
    assert notices == [
        f"{root}/train: 7 files left out: 3 .jfif, 1 in no class folder, 1 without an extension, 1 .gif, "
        "1 links that lead nowhere; convert images of other formats to PNG; rename JPEG files so that they end in .jpg",
        f"{root}/val: no images of 1 of 2 classes: dog",
    ]


def test_a_file_in_no_class_folder_gets_no_advice_on_formats(make_folder: MakeFolder, notices: list[str]) -> None:
    root = make_folder(train={"cat": 1, "dog": 1}, val={"cat": 1, "dog": 1})
    (root / "train/README.md").touch()
    open_folder(root, "train")
    assert notices == [f"{root}/train: 1 file left out: 1 in no class folder"]


def test_a_class_whose_link_leads_nowhere_is_refused_by_name(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 1, "dog": 1}, val={"cat": 1})
    (root / "train/emu").symlink_to("/not/mounted")
    assert message(root) == (
        f"data.path: {root}/train/emu is a link to /not/mounted, which cannot be reached; mount it or remove the link"
    )


def test_a_folder_too_deep_or_too_high_is_refused_with_what_would_work(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 1, "dog": 1}, val={"cat": 1})
    with pytest.raises(DataError, match=f"its folder {root} is \\(image folder\\): give that one"):
        open_source(DataConfig(path=str(root.parent)), "train")
    assert f"has no folder train; write data.path: {root}" in message(root / "train")
    shutil.move(root / "val", root / "inner")
    (root / "val").mkdir()
    shutil.move(root / "inner", root / "val/images")
    assert message(root, "val").endswith(f"holds cat; if these are the classes, move them up: mv {root}/val/images/* {root}/val/")
    shutil.move(root / "train", root / "inner")
    shutil.move(root / "inner", root / "train/train")
    assert message(root).endswith(
        f"holds cat, dog; if these are the classes, move them up: mv {root}/train/train/* {root}/train/"
    )


@pytest.mark.parametrize(
    ("folder", "problem"), [("", "has its images in no class folders"), ("images", "has classes that train has not: images")]
)
def test_validation_images_in_no_class_folder_are_refused_with_what_to_do(
    make_folder: MakeFolder, folder: str, problem: str
) -> None:
    root = make_folder(train={"n01": 1, "n02": 1})
    flat = root / "val" / folder
    flat.mkdir(parents=True)
    photo(1).save(flat / "val_0.JPEG")
    (root / "val/val_annotations.txt").write_text("val_0.JPEG n01")
    with pytest.raises(DataError) as caught:
        _listed(root)
    assert str(caught.value) == (
        f"{root}/val {problem}; "
        "move each image to its class's folder, val/CLASS/, named as in train (val_annotations.txt may say which)"
    )


def test_a_folder_that_belongs_to_two_classes_is_refused_and_one_that_counts_twice_is_named(
    make_folder: MakeFolder, notices: list[str]
) -> None:
    root = make_folder(train={"cat": 2, "dog": 1}, val={"cat": 1})
    (root / "train/dog/deep").mkdir()
    photo(1).save(root / "train/dog/deep/x.jpg")
    (root / "train/dog/again").symlink_to("deep")
    assert len(_listed(root, val_share=0).splits["train"].locations) == 5
    assert notices == [f"{root}/train/dog/again and {root}/train/dog/deep are one folder: its images count twice"]
    (root / "train/kitty").symlink_to("cat")
    assert f"train/kitty and {root}/train/cat are one folder: its images would be of two classes" in message(root)


def test_names_in_two_unicode_forms_are_one_class(make_folder: MakeFolder, notices: list[str]) -> None:
    composed, decomposed = (unicodedata.normalize(form, "Käfer") for form in ("NFC", "NFD"))
    root = make_folder(train={composed: 2, decomposed: 1, "zebra": 1}, val={decomposed: 3, "zebra": 1})
    train, val = open_folder(root, "train"), open_folder(root, "val")
    assert train.classes == val.classes == (composed, "zebra")
    assert (train.labels_N.tolist(), val.labels_N.tolist()) == ([0, 0, 0, 1], [0, 0, 0, 1])
    assert all(decode_image(train.read(index)).mode == "RGB" for index in range(4))
    what = f"folders whose names differ in their Unicode form alone (NFC and NFD) are one class: {composed}"
    assert notices == [f"{root}/train: {what}", f"{root}/val: {what}"]


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems take no names that are not text")
def test_a_class_whose_name_is_not_text_has_a_printable_one(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cafe": 1, "zebra": 1}, val={"cafe": 1})
    for split in ("train", "val"):
        folder = os.fsencode(root / split)
        os.rename(folder + b"/cafe/000.jpg", folder + b"/cafe/\xe9.jpg")
        os.rename(folder + b"/cafe", folder + b"/caf\xe9")
    source = open_folder(root, "val")
    assert (source.classes, source.name(0)) == (("caf\\xe9", "zebra"), "val/caf\\xe9/\\xe9.jpg")
    assert decode_image(source.read(0)).mode == "RGB"


def test_a_class_that_validation_lacks_keeps_its_label(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1, "b": 1, "c": 1}, val={"c": 2})
    source = open_folder(root, "val")
    assert source.classes == ("a", "b", "c")
    assert source.labels_N.tolist() == [2, 2]
    (root / "val" / "a").mkdir()
    assert open_folder(root, "val").labels_N.tolist() == [2, 2]


def test_a_class_that_only_validation_has_is_refused_by_name(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1}, val={"a": 1, "zebra": 1})
    _listed(root, val_share=0)
    with pytest.raises(DataError, match="zebra"):
        _listed(root)


def test_classes_whose_names_differ_in_case_or_blanks_alone_are_named(make_folder: MakeFolder, notices: list[str]) -> None:
    root = make_folder(train={"Cat": 1, "cat": 1, "dog": 1}, val={"dog ": 1})
    assert _listed(root, val_share=0).classes == ("Cat", "cat", "dog")
    assert notices == [f"{root}/train: classes whose names differ in case or blanks alone: Cat, cat"]
    with pytest.raises(DataError, match="'dog ' is 'dog' in train; rename them"):
        _listed(root)


def test_folders_that_may_group_classes_are_named(make_folder: MakeFolder, notices: list[str]) -> None:
    root = make_folder(train={"birds": 4, "cats/images": 2, "fish": 2}, val={"fish": 1})
    for number in range(2):
        (root / "train" / "birds" / str(number)).mkdir()
        (root / "train" / "birds" / f"00{number}.jpg").rename(root / "train" / "birds" / str(number) / "x.jpg")
    _listed(root, val_share=0)
    assert notices == []  # birds has images of its own, cats one folder
    for number in range(2, 4):
        (root / "train" / "birds" / f"00{number}.jpg").rename(root / "train" / "birds" / "0" / f"{number}.jpg")
    _listed(root, val_share=0)
    says = "classes whose images are in inner folders: 1, such as birds/0: the class is the outer folder"
    assert notices == [f"{root}/train: {says}"]


def test_class_folders_without_a_split_are_refused_with_what_to_do(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1, "b": 1}, val={"a": 1})
    for name in ("a", "b"):
        (root / "train" / name).rename(root / name)
    (root / "train").rmdir()
    shutil.rmtree(root / "val")
    says = message(root)
    assert "if its folders a, b are classes: to hold out some of the training images write data.val_share: 0.1" in says
    assert "or move each to train/CLASS/ and a part of its images to val/CLASS/" in says


def test_class_folders_without_a_split_are_the_classes_of_a_held_out_share(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 8, "b": 8}) / "train"
    lines: list[str] = []
    with notices_to(lines.append):
        train, val = (open_source(DataConfig(path=str(root), val_share=0.3), split) for split in SPLIT_NAMES)
    assert f"{root} has no folder train: its folders are the classes" in lines
    assert (train.classes, len(train) + len(val)) == (("a", "b"), 16)
    assert train.read(0) == (root / train.name(0)).read_bytes()
    root = root.rename(root.with_name("flowers"))
    for name, renamed in (("a", "train_images"), ("b", "test_images")):
        (root / name).rename(root / renamed)
    with pytest.raises(DataError, match=f"rename them: mv {root}/train_images {root}/train && mv {root}/test_images {root}/val"):
        open_source(DataConfig(path=str(root), val_share=0.4), "train")


@pytest.mark.parametrize(
    ("folders", "file", "says"),
    [
        (("images", "labels"), "data.yaml", "YOLO's boxes"),
        (("train/images", "train/labels", "val/images"), "data.yaml", "YOLO's boxes"),
        (("JPEGImages", "Annotations"), "readme.txt", "Pascal VOC's boxes"),
        (("train2017", "annotations"), "annotations/instances_train2017.json", "COCO's boxes"),
        (("images", "masks"), "readme.txt", "masks"),
    ],
)
def test_data_sets_of_other_tasks_are_refused_by_name(tmp_path: Path, folders: tuple[str, ...], file: str, says: str) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        photo(1).save(tmp_path / folder / "0.jpg")
    (tmp_path / file).write_text("{}")
    with pytest.raises(NoLabelsError, match=f"has {says}, and no class of a whole image: crop objects to train"):
        open_source(DataConfig(path=str(tmp_path)), "train")


def test_bad_folders_are_refused_in_one_line(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1}, val={"a": 1})

    assert "does not exist; write digits, synthetic" in message(root / "absent")
    assert "is a file" in message(root / "train" / "a" / "000.jpg")
    assert "no folder train" in message(root / "val")
    (root / "train" / "empty").mkdir()
    assert "train/empty holds no images" in message(root)
    (root / "train" / "empty").rmdir()
    (root / "val" / "a" / "000.jpg").rename(root / "val" / "a" / "000.txt")
    assert "val holds no images" in message(root, "val")
    shutil.rmtree(root / "val")
    assert "no validation folder" in message(root, "val")
    shutil.rmtree(root / "train" / "a")
    photo(1).save(root / "train" / "flat.jpg")
    assert "no class folders" in message(root)
    assert "no folder train" in message(root / "train", "val")


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
        open_folder(root, "train")
    text = f"data.path: {root / link} is a link to {real}, in which it lies: its images would count again and again; "
    assert str(caught.value) == f"{text}remove the link"


def test_links_that_lead_to_each_other_or_to_themselves_end(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder(train={"a": 1, "b": 1}, val={"a": 1})
    (root / "train/a/b").symlink_to("../b")
    (root / "train/b/a").symlink_to("../a")
    with pytest.raises(DataError, match=r"train/a/b/a is a link to \S+/train/a, in which it lies"):
        open_folder(root, "train")
    for link in ("train/a/b", "train/b/a"):
        (root / link).unlink()
    for name in "xy":
        (root / "train/a" / name).symlink_to(".")
    with pytest.raises(DataError, match="in which it lies"):
        open_folder(root, "train")
    for name in "xy":
        (root / "train/a" / name).unlink()
    (tmp_path / "elsewhere/cats").mkdir(parents=True)
    photo(1).save(tmp_path / "elsewhere/cats/0.png")
    (tmp_path / "elsewhere/cats/up").symlink_to("..")
    (root / "train/cats").symlink_to(tmp_path / "elsewhere/cats")
    with pytest.raises(DataError, match=r"train/cats/up is a link to .*elsewhere, in which it lies"):
        open_folder(root, "train")


def test_links_that_lead_elsewhere_are_followed(make_folder: MakeFolder, tmp_path: Path) -> None:
    real = make_folder(train={"a": 2, "b": 1}, val={"a": 1})
    root = tmp_path / "linked"
    root.mkdir()
    (root / "train").symlink_to(real / "train")
    (root / "val").symlink_to("train")
    (tmp_path / "more").mkdir()
    photo(9).save(tmp_path / "more" / "x.jpg")
    (real / "train/a/more").symlink_to(tmp_path / "more")
    (real / "train/a/broken.jpg").symlink_to("broken.jpg")
    _agrees_with_imagefolder(open_folder(root, "train"), root, "train")
    _agrees_with_imagefolder(open_folder(root, "val"), root, "val")


@pytest.mark.skipif(sys.platform != "linux", reason="the first page of /proc/self/mem is a disk that fails")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_disk_that_fails_ends_the_epoch_with_the_samples_name(make_folder: MakeFolder, workers: int) -> None:
    root = make_folder(train={"a": 1}, val={"a": 3})
    (root / "val" / "a" / "001.jpg").unlink()
    (root / "val" / "a" / "001.jpg").symlink_to("/proc/self/mem")
    config = DataConfig(path=str(root), image_size=32, global_batch_size=2, max_bad=0.9)
    loader = Loader(open_source(config, "val"), config, split="val", seed=0, rank=0, world_size=1, loader_workers=workers)
    with pytest.raises(DataError, match=r"^data.path: val/a/001.jpg cannot be read: Input/output error; fix its disk"):
        list(loader.epoch(0))
    loader.close()


def test_a_name_that_is_not_text_can_be_read_and_printed(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1}, val={"a": 1})
    os.rename(root / "train/a/000.jpg", os.fsencode(root / "train/a") + b"/\xff\xfe.jpg")
    source = open_folder(root, "train")
    source.name(0).encode()
    assert decode_image(source.read(0)).mode == "RGB"


def test_names_of_classes_that_are_sorted_as_text_are_a_notice(make_folder: MakeFolder, notices: list[str]) -> None:
    root = make_folder(train={"8": 1, "9": 1, "10": 1}, val={"9": 1})
    assert open_folder(root, "train").classes == ("10", "8", "9")
    assert f"{root}/train: classes in the order 10, 8, 9 … (sorted as text, as ImageFolder sorts its folders)" in notices


def test_a_class_of_images_in_another_format_is_refused_with_what_to_do(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1, "b": 1}, val={"a": 1})
    (root / "train" / "b" / "000.jpg").rename(root / "train" / "b" / "000.heic")
    assert ".webp (but 000.heic: convert images to PNG); add some or remove it" in message(root)
