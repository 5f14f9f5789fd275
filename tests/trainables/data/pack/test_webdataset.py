"""Tars as people write them: every image is packed under its own class, or the sample is named."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from tests.trainables.data.packed import contents, names, noticed, packed, refusal, write_tar
from tests.trainables.data.photos import encoded, photo

JPEGS = [encoded(photo(seed), "JPEG") for seed in range(4)]
Members = list[tuple[str, bytes]]


def pair(stem: str, label: str, number: int = 0, image: str = "jpg") -> Members:
    return [(f"{stem}.{image}", JPEGS[number]), (f"{stem}.cls", label.encode())]


def write_set(root: Path, train: Members, val: Members | None = None) -> Path:
    root.mkdir(exist_ok=True)
    write_tar(root / "train-000.tar", train)
    write_tar(root / "val-000.tar", val or [*pair("0", "a"), *pair("1", "b")])
    return root


@pytest.mark.parametrize(
    "members",
    [
        pair("2022.05.1", "a") + pair("2022.05.2", "b", 1),
        pair("n01.v2_000123", "a") + pair("plain", "b", 1),
        pair("v1.0/set.a/1", "a") + pair("v1.0/set.b/1", "b", 1),
        pair("./1", "a", 0, "JPEG") + pair("./2", "b", 1, "img"),
        [*reversed(pair("1", "a")), *reversed(pair("2", "b", 1))],
        [("1.jpg", JPEGS[0]), ("2.jpg", JPEGS[1]), ("2.cls", b"b\n"), ("1.cls", b" a ")],
        [("1.img.jpg", JPEGS[0]), ("1.cls.txt", b"a"), ("2.img.jpg", JPEGS[1]), ("2.cls.txt", b"b")],
        [("1.jpg", JPEGS[0]), ("1.json", b'{"label": "a"}'), ("2.jpg", JPEGS[1]), ("2.json", b'{"caption": "x", "class": "b"}')],
        [("1.jpg", JPEGS[0]), ("1.cls", b'{"target": "a"}'), ("1.json", b"{}"), *pair("2", "b", 1), ("2.txt", b"caption")],
        [*pair("1", "a"), ("1.json", b'{"label": 7}'), *pair("2", "b", 1), ("2.json", b'{"label": "beta"}')],
        [*pair("1", "a"), ("._1.jpg", b"x"), ("__MACOSX/._1.cls", b"x"), ("dir/.hidden.jpg", b"x"), *pair("2", "b", 1)],
    ],
)
def test_images_and_labels_are_paired_as_people_name_them(tmp_path: Path, members: Members) -> None:
    train, _ = packed(write_set(tmp_path / "wds", members))
    assert [(content, train.classes[label]) for content, label in zip(contents(train), train.labels_N, strict=True)] == [
        (JPEGS[0], "a"),
        (JPEGS[1], "b"),
    ]


def test_whole_numbers_in_json_may_have_a_fraction(tmp_path: Path) -> None:
    members = [("1.jpg", JPEGS[0]), ("1.json", b'{"label": 1.0}'), ("2.jpg", JPEGS[1]), ("2.json", b'{"label": 0.0}')]
    train, _ = packed(write_set(tmp_path / "wds", members, members))
    assert (train.classes, train.labels_N.tolist()) == (("0", "1"), [1, 0])


def test_a_tar_for_each_class_is_refused_with_what_to_do(tmp_path: Path) -> None:
    root = write_set(tmp_path / "wds", [("n01_1.jpg", JPEGS[0])])
    assert f"or if each tar is a class, unpack it into a folder {root}/train-000" in refusal(root)


def test_names_in_pax_headers_are_whole(tmp_path: Path) -> None:
    root = write_set(tmp_path / "wds", [])
    with tarfile.open(root / "train-000.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in pair("é" * 120 + "/1.5", "a") + pair("ü" * 120 + "/1.6", "b"):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert names(packed(root)[0]) == [f"train-000.tar/{'é' * 120}/1.5.jpg", f"train-000.tar/{'ü' * 120}/1.6.jpg"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (pair("1", "a") + pair("1", "b", 1), "the sample 1 is there twice (1.jpg, 1.jpg)"),
        ([*pair("1", "a"), ("1.png", JPEGS[1])], "the sample 1 is there twice (1.jpg, 1.png)"),
        (
            [("1.left.jpg", JPEGS[0]), ("1.right.jpg", JPEGS[1]), ("1.cls", b"a")],
            "the sample 1 has two images (1.left.jpg, 1.right.jpg)",
        ),
        ([("2022.05.1.jpg", JPEGS[0]), ("2022.05.2.cls", b"a")], "the sample 2022.05.1 has no .cls and no .json with its class"),
        ([*pair("1", "a"), ("2.5.cls", b"a")], "the sample 2.5 has no image"),
        ([*pair("1", "a"), ("2.jpg", JPEGS[0]), ("2.json", b'{"caption": "x"}')], "the sample 2 has no .cls and no .json with"),
        (pair("1", "") + pair("2", "a"), "the sample 1 has no .cls and no .json with its class"),
        ([*pair("1", "3"), ("1.json", b'{"label": 5}')], "the sample 1 has class 3 in its .cls and 5 in its .json: remove one"),
        ([("n01440764.tar", b"x")], "holds tars, such as n01440764.tar: unpack them into train/CLASS/"),
    ],
)
def test_a_sample_that_is_not_one_image_and_one_class_is_refused_by_its_key(tmp_path: Path, members: Members, words: str) -> None:
    assert words in refusal(write_set(tmp_path / "wds", members))


def test_further_images_of_a_sample_are_counted(tmp_path: Path) -> None:
    root = write_set(tmp_path / "wds", [*pair("1", "a"), ("1.mask.png", JPEGS[1]), *pair("2", "b")])
    assert f"{root}: not used, since a sample has one image: train-000.tar/1.mask.png" in noticed(root)


def test_a_link_in_a_tar_is_refused(tmp_path: Path) -> None:
    root = write_set(tmp_path / "wds", pair("1", "a") + pair("2", "b"))
    with tarfile.open(root / "train-000.tar", "a") as tar:
        info = tarfile.TarInfo("3.jpg")
        info.type, info.linkname = tarfile.LNKTYPE, "1.jpg"
        tar.addfile(info)
    assert "3.jpg is a link or no plain file; write the tar with `tar --hard-dereference -h`" in refusal(root)


def test_indices_stay_indices_and_other_numbers_are_sorted_as_an_image_folders_names(tmp_path: Path) -> None:
    def members(labels: range) -> Members:
        return [member for label in labels for member in pair(f"s{label}", str(label))]

    zero = packed(write_set(tmp_path / "zero", members(range(12)), members(range(12))))[0]
    assert (zero.classes[:3], zero.labels_N.tolist()) == (("0", "1", "2"), list(range(12)))
    root = write_set(tmp_path / "one", members(range(1, 13)), members(range(1, 13)))
    assert f"{root}: classes in the order 1, 10, 11, 12, 2 … (sorted as text, as ImageFolder sorts its folders)" in noticed(root)
    integers = [(f"{label}.json", json.dumps({"label": label}).encode()) for label in range(1, 13)]
    images = [(f"{label}.jpg", JPEGS[0]) for label in range(1, 13)]
    assert packed(write_set(tmp_path / "json", [*integers, *images], [*integers, *images]))[0].classes[:3] == ("1", "2", "3")


def test_labels_of_minus_one_are_no_class(tmp_path: Path) -> None:
    root = write_set(tmp_path / "some", pair("1", "0") + pair("2", "1") + pair("3", "-1"), pair("1", "0") + pair("2", "1"))
    assert f"{root}: 1 train samples have the label -1 (unlabeled) and are skipped" in noticed(root)
    root = write_set(tmp_path / "all", pair("1", "0") + pair("2", "1"), pair("1", "-1"))
    assert "all 1 val samples have the label -1 (unlabeled); give a labeled split" in refusal(root)


def test_a_tar_of_class_folders_is_refused_with_where_to_unpack_it(tmp_path: Path) -> None:
    root = write_set(tmp_path / "wds", [("cat/1.jpg", JPEGS[0]), ("dog/1.jpg", JPEGS[1])])
    assert refusal(root) == (
        f"{root}/train-000.tar: its images lie in folders (cat/1.jpg) without a .cls or .json: if these are the classes, "
        f"unpack it into {root}/train/CLASS; or give tars with KEY.jpg and KEY.cls"
    )
