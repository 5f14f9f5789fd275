"""ImageNet as it is downloaded, in small: 3 classes whose development kit numbers them in another order than their names."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from tests.trainables.data.packed import contents, names, packed, refusal, write_tar
from tests.trainables.data.photos import encoded, photo
from trainables.data.pack.readers import find_reader

JPEGS = [encoded(photo(seed), "JPEG") for seed in range(9)]
WNIDS = ("n02", "n03", "n01")
"""The classes by their IDs 1 … 3."""
VAL_IDS = (2, 3, 1)
TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
TRUTH_FILE = "ILSVRC2012_validation_ground_truth.txt"
TRUTH = "".join(f"{number}\n" for number in VAL_IDS).encode()


def tar_bytes(members: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def meta() -> bytes:
    """meta.mat: the three classes and an inner node of WordNet."""
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)]
    rows = [(np.float64(number), wnid, "x") for number, wnid in enumerate((*WNIDS, "n00"), 1)]
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": np.array(rows, dtype=kinds)})
    return buffer.getvalue()


def train_members(wnid: str) -> list[tuple[str, bytes]]:
    return [(f"{wnid}_{number}.JPEG", JPEGS[2 * WNIDS.index(wnid) + number]) for number in range(2)]


def val_members() -> list[tuple[str, bytes]]:
    return [(f"ILSVRC2012_val_{number:08}.JPEG", JPEGS[5 + number]) for number in (3, 1, 2)]


def write_tars(root: Path) -> Path:
    root.mkdir()
    write_tar(root / TRAIN_TAR, [(f"{wnid}.tar", tar_bytes(train_members(wnid))) for wnid in WNIDS])
    write_tar(root / VAL_TAR, val_members())
    return root


def write_folders(root: Path) -> Path:
    for wnid in WNIDS:
        (root / "train" / wnid).mkdir(parents=True)
        for name, content in train_members(wnid):
            (root / "train" / wnid / name).write_bytes(content)
    (root / "val").mkdir()
    for name, content in val_members():
        (root / "val" / name).write_bytes(content)
    return root


def write_kit(root: Path) -> None:
    with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
        for name, content in (("validation_ground_truth.txt", TRUTH), ("meta.mat", meta())):
            info = tarfile.TarInfo("ILSVRC2012_devkit_t12/data/" + ("ILSVRC2012_" if name[0] == "v" else "") + name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def assert_right(root: Path) -> None:
    train, val = packed(root)
    assert train.classes == ("n01", "n02", "n03")
    assert (contents(train), train.labels_N.tolist()) == ([JPEGS[4], JPEGS[5], *JPEGS[:4]], [0, 0, 1, 1, 2, 2])
    assert contents(val) == JPEGS[6:9]
    assert [val.classes[label] for label in val.labels_N] == [WNIDS[number - 1] for number in VAL_IDS]


def test_the_official_tars_are_read_with_the_development_kit(tmp_path: Path) -> None:
    root = write_tars(tmp_path / "imagenet")
    write_kit(root)
    assert_right(root)
    assert names(packed(root)[0])[0] == "ILSVRC2012_img_train.tar/n01_0.JPEG"


def test_unpacked_images_are_read_with_their_ground_truth(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "imagenet")
    write_kit(root)
    assert_right(root)


def test_the_kits_two_files_may_lie_next_to_the_images(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "imagenet")
    (root / "val" / TRUTH_FILE).write_bytes(TRUTH)
    assert "what its numbers mean: put image-net.org's development kit for tasks 1 & 2 there" in refusal(root)
    (root / "meta.mat").write_bytes(meta())
    assert_right(root)


def test_tars_and_folders_may_be_mixed(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "imagenet")
    write_tars(tmp_path / "tars")
    (tmp_path / "tars" / VAL_TAR).rename(root / VAL_TAR)
    write_kit(root)
    assert_right(root)


def test_class_folders_of_both_splits_come_before_the_tars_they_were_unpacked_from(tmp_path: Path) -> None:
    root = write_tars(tmp_path / "imagenet")
    for split in ("train", "val"):
        (root / split / "n01").mkdir(parents=True)
    assert find_reader(root) == "image folder"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda root: None, f"need {TRUTH_FILE} and meta.mat"),
        (
            lambda root: (root / VAL_TAR).unlink(),
            f"{VAL_TAR} is not with it; add it, or unpack both",
        ),
        (
            lambda root: (root / "meta.mat").write_bytes(b"x" * 200),
            f"meta.mat or {TRUTH_FILE} is damaged",
        ),
        (
            lambda root: (root / TRUTH_FILE).write_text("1\n"),
            "ILSVRC2012_val_00000002.JPEG has no label",
        ),
        (lambda root: (root / TRUTH_FILE).write_text("4\n1\n1"), "labels that train does not have: n00"),
        (lambda root: write_tar(root / TRAIN_TAR, train_members("n01")), "and not a tar per class"),
    ],
)
def test_what_is_missing_or_damaged_is_named(tmp_path: Path, break_it: object, words: str) -> None:
    root = write_tars(tmp_path / "imagenet")
    if "need" not in words:
        (root / TRUTH_FILE).write_bytes(TRUTH)
        (root / "meta.mat").write_bytes(meta())
    assert callable(break_it)
    break_it(root)
    assert words in refusal(root)


def test_a_tar_of_a_class_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    root = write_tars(tmp_path / "imagenet")
    write_kit(root)
    write_tar(root / TRAIN_TAR, [("n01.tar", tar_bytes(train_members("n01"))[:700])])
    assert "ILSVRC2012_img_train.tar is truncated (its last file is not whole); download it again" in refusal(root)


def test_tiny_imagenets_annotations_label_its_validation_images(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    for wnid in ("n02", "n01"):
        (root / "train" / wnid / "images").mkdir(parents=True)
        (root / "train" / wnid / "images" / f"{wnid}_0.JPEG").write_bytes(JPEGS[0])
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    (root / "val" / "images").mkdir(parents=True)
    for number in range(2):
        (root / "val" / "images" / f"val_{number}.JPEG").write_bytes(JPEGS[number])
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    train, val = packed(root)
    assert (train.classes, val.labels_N.tolist(), names(val)) == (
        ("n01", "n02"),
        [1, 0],
        ["val/images/val_0.JPEG", "val/images/val_1.JPEG"],
    )
