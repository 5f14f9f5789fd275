"""Lists of image files and their classes, as people write them."""

import re
import shutil
from pathlib import Path

import pytest

from tests.trainables.data.packed import contents, names, noticed, packed, refusal
from tests.trainables.data.photos import encoded, photo
from trainables.data.pack.readers.image_list import ImageListReader
from trainables.errors import DataError
from trainables.notices import notices_to

JPEGS = [encoded(photo(seed), "JPEG") for seed in range(4)]
FILES = ("a 0.jpg", "b.jpg", "c.jpg", "d.jpg")


def write_lists(root: Path, lists: dict[str, str], folder: str = "images") -> Path:
    for name, content in zip(FILES, JPEGS, strict=True):
        path = root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for file, text in lists.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


@pytest.mark.parametrize(
    "lists",
    [
        {"train.csv": "path,label\nimages/a 0.jpg,cat\nimages/b.jpg,ant\n", "val.csv": "path,label\nimages/c.jpg,ant\n"},
        {"train.csv": "images/a 0.jpg,cat\nimages/b.jpg,ant\n", "test.csv": "images/c.jpg,ant\n"},
        {"train.txt": "images/a 0.jpg cat\n\n./images/b.jpg ant\n", "val.txt": "images/c.jpg ant\n"},
        {"train.tsv": "label\tfile_name\nant\timages/b.jpg\ncat\timages/a 0.jpg\n", "val.tsv": "ant\timages/c.jpg\n"},
        {
            "train.csv": '\ufeffid;image;class\n1;"images\\a 0.jpg";cat\n2;images/b.jpg;ant\n',
            "val.csv": "image;class\nimages/c.jpg;ant\n",
        },
        {"all.csv": "image_id,label,split\nimages/a 0.jpg,cat,train\nimages/b.jpg,ant,Train\nimages/c.jpg,ant,valid\n"},
        {"meta/train.csv": "../images/a 0.jpg,cat\n../images/b.jpg,ant\n", "meta/val.csv": "../images/c.jpg,ant\n"},
    ],
)
def test_lists_of_paths_and_classes_are_read(tmp_path: Path, lists: dict[str, str]) -> None:
    if "val.tsv" in lists:
        lists["val.tsv"] = "label\tfile_name\n" + lists["val.tsv"]
    train, val = packed(write_lists(tmp_path / "set", lists))
    assert train.classes == ("ant", "cat")
    assert {train.name(index): (contents(train)[index], int(train.labels_N[index])) for index in range(2)} == {
        "images/a 0.jpg": (JPEGS[0], 1),
        "images/b.jpg": (JPEGS[1], 0),
    }
    assert (names(val), val.labels_N.tolist()) == (["images/c.jpg"], [0])


def test_caffes_lists_of_indices_are_relative_to_the_splits_folders(tmp_path: Path) -> None:
    root = write_lists(tmp_path / "set", {"train.txt": "n02/a 0.jpg 10\nn02/b.jpg 1\n", "val.txt": "c.jpg 10\n"}, "train/n02")
    (root / "val").mkdir()
    (root / "train" / "n02" / "c.jpg").rename(root / "val" / "c.jpg")
    train, val = packed(root)
    assert (names(train), names(val)) == (["train/n02/a 0.jpg", "train/n02/b.jpg"], ["val/c.jpg"])
    assert (train.classes, val.labels_N.tolist()) == (("1", "10"), [1])


def test_one_list_file_is_a_source_of_its_own(tmp_path: Path) -> None:
    root = write_lists(
        tmp_path / "set", {"labels.csv": "path,target,split\nimages/b.jpg,1,train\nimages/c.jpg,0,train\nimages/d.jpg,1,val\n"}
    )
    assert packed(root / "labels.csv")[0].labels_N.tolist() == [1, 0]
    (root / "labels.csv").write_text("path,label\nimages/b.jpg,1\n")
    assert "has no train rows: add a column `split` of train, training and val, valid" in refusal(root / "labels.csv")


def test_missing_files_are_counted_and_named(tmp_path: Path) -> None:
    root = write_lists(tmp_path / "set", {"train.csv": "images/b.jpg,x\nimages/no.jpg,y\n", "val.csv": "images/c.jpg,x\n"})
    assert f"{root}/train.csv: 1 of its 2 files are missing, such as images/no.jpg" in noticed(root)
    assert "images/no.jpg" in (tmp_path / "set-packed" / "unreadable.jsonl").read_text()
    (root / "train.csv").write_text("x/b.jpg,x\nx/c.jpg,y\n")
    assert f"2 of its 2 files are missing, such as x/b.jpg, x/c.jpg; write paths relative to {root}" in refusal(root)


def test_rows_that_are_no_image_and_class_are_refused(tmp_path: Path) -> None:
    root = write_lists(tmp_path / "set", {"train.csv": "path,label\nimages/b.jpg\n", "val.csv": "images/c.jpg,x\n"})
    assert "train.csv: row 2 (images/b.jpg) has no class" in refusal(root)
    (root / "train.csv").write_text(f'path,label\n"images/b.jpg,{"x" * 2**17}\n')  # a quote that nothing closes
    assert "train.csv cannot be read near line" in refusal(root)
    (root / "train.csv").write_text("path,caption\nimages/b.jpg,a dog\n")
    assert "train.csv has no class column" in refusal(root)
    (root / "train.csv").write_text("images/b.jpg,0,1,1\n")
    assert "train.csv has no class column" in refusal(root)


def test_the_column_that_is_chosen_of_several_is_a_notice(tmp_path: Path) -> None:
    header = "path,coarse_label,fine_label\n"
    lists = {"train.csv": header + "images/b.jpg,x,1\nimages/c.jpg,x,0\n", "val.csv": header + "images/d.jpg,x,1\n"}
    assert "list of images: the column fine_label is the class; not used: coarse_label" in noticed(
        write_lists(tmp_path / "set", lists)
    )


TABLE = "image_id,label\na 0,cat\nb,ant\nc,ant\nd,cat\n"


def test_images_are_found_in_the_one_folder_and_by_the_one_extension_that_fit(tmp_path: Path) -> None:
    root = write_lists(tmp_path / "set", {"train.csv": TABLE, "val.csv": "image_id,label\nd,cat\n"}, "data/photos")
    assert f"{root}/train.csv: its a 0 is taken for data/photos/a 0.jpg, and so on" in noticed(root)
    assert names(packed(root)[0]) == [f"data/photos/{name}" for name in FILES]
    shutil.copytree(root / "data" / "photos", root / "small")
    assert "train.csv: its a 0 may be data/photos/a 0.jpg or small/a 0.jpg: write such paths" in refusal(root)
    shutil.copytree(root / "small", root / "train")
    shutil.copytree(root / "small", root / "val")
    assert names(packed(root)[1]) == ["val/d.jpg"]


def test_hugging_faces_metadata_in_json_lines_is_a_list(tmp_path: Path) -> None:
    line = '{"file_name": "a 0.jpg", "label": 3}\n'
    root = write_lists(tmp_path / "set", {"train/metadata.jsonl": line + '\n{"label": 1, "file_name": "b.jpg"}\n'}, "train")
    shutil.copytree(root / "train", root / "test")
    (root / "test" / "metadata.jsonl").write_text(line)
    train, val = packed(root)
    assert (names(train), train.classes, train.labels_N.tolist()) == (["train/a 0.jpg", "train/b.jpg"], ("1", "3"), [1, 0])
    assert names(val) == ["test/a 0.jpg"]
    (root / "train" / "metadata.jsonl").write_text(line + "{")
    assert "metadata.jsonl cannot be read in line 2" in refusal(root)


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("path,label\nimages/b.jpg,-7.0\nimages/c.jpg,10.0\n", ("-7", "10")),  # of pandas
        (
            "path,label\nimages/b.jpg,123456789012345678901.0\nimages/c.jpg,red panda\nimages/d.jpg,red\na 0.jpg,panda\n",
            ("123456789012345678901", "panda", "red", "red panda"),
        ),
        ("images/b.jpg 0.000e+00\nimages/c.jpg 1.000e+00\n", ("0", "1")),  # of numpy
        ("path\tlabel\nimages/b.jpg\tthé\nimages/c.jpg\tcafé\n".encode("utf-16"), ("café", "thé")),  # of Excel
        ("path,label\nimages/b.jpg,thé\n".encode("latin-1"), ("th\\xe9",)),
    ],
)
def test_classes_as_other_programs_write_them_are_read(tmp_path: Path, text: str | bytes, classes: tuple[str, ...]) -> None:
    root = write_lists(tmp_path / "set", {})
    (root / "list.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert ImageListReader(root, val_share=0).listing().classes == classes


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("images/b.jpg,1\nimages/c.jpg,0.5\n", "images/c.jpg has the class 0.5: write whole numbers or names"),
        ("images/b.jpg,1.0\nimages/c.jpg,nan\n", "images/c.jpg has the class nan"),
        ("images/b.jpg,0\nimages/c.jpg,0|2\n", "images/c.jpg has several classes (0|2), and an image here has one"),
        ("images/b.jpg,cat\nimages/c.jpg,dog\nimages/d.jpg,dog; cat\n", "images/d.jpg has several classes (dog; cat)"),
        ('images/b.jpg,"[1]"\nimages/c.jpg,"[0, 1]"\n', "images/c.jpg has several classes ([0, 1])"),
        ("images/b.jpg,0.9 0.1\nimages/c.jpg,0.2 0.8\n", "images/c.jpg has several classes (0.2 0.8)"),
        ("images/b.jpg,['cat']\nimages/c.jpg,['dog']\nimages/d.jpg,\"['cat', 'dog']\"\n", "images/d.jpg has several classes"),
    ],
)
def test_labels_that_are_not_one_class_are_refused_with_their_image(rows: str, problem: str, tmp_path: Path) -> None:
    root = write_lists(tmp_path / "set", {"list.csv": f"path,label\n{rows}"})
    with pytest.raises(DataError, match=re.escape(problem)):
        ImageListReader(root, val_share=0).listing()


def test_unused_labels_are_not_checked_and_rewritten_ones_have_a_notice(tmp_path: Path) -> None:
    root, lines = write_lists(tmp_path / "set", {"list.csv": "path,label\nimages/b.jpg,0|1\nimages/c.jpg,0.5\n"}), list[str]()
    assert len(ImageListReader(root, labels=False, val_share=0).listing().splits["train"].locations) == 2
    (root / "list.csv").write_text("path,label\nimages/b.jpg,1\nimages/c.jpg,1.0\n")
    with notices_to(lines.append):
        assert ImageListReader(root, val_share=0).listing().classes == ("1",)
    assert lines == [f"{root}: the class 1.0 is read as 1, and so on"]


def test_what_a_list_says_twice_is_a_notice_or_refused(tmp_path: Path) -> None:
    train, val = "images/b.jpg,cat\nimages/c.jpg,Cat\n", "images/c.jpg,cat\nimages/d.jpg,cat\n"
    root = write_lists(tmp_path / "set", {"train.csv": f"{train}images/b.jpg,cat\n", "val.csv": val})
    lines = noticed(root)
    assert f"{root}/train.csv: 1 rows repeat an image: it counts again" in lines
    assert f"{root}: 1 of the validation images are training images too: images/c.jpg" in lines
    assert f"{root}: classes whose names differ in case or blanks alone: Cat, cat" in lines
    (root / "train.csv").write_text(f"{train}images/b.jpg,dog\n")
    assert "train.csv: line 1 and a later one give images/b.jpg two classes: write one class for each image" in refusal(root)


def test_a_list_without_classes_beside_others_is_not_used(tmp_path: Path) -> None:
    root = write_lists(tmp_path / "set", {"train.csv": TABLE, "test.csv": "image_id\nb\n"})
    lines: list[str] = []
    with notices_to(lines.append):
        listing = ImageListReader(root, val_share=0).listing()
    assert f"{root}: lists without a class column are not used: test.csv" in lines
    assert len(listing.splits["train"].locations) == len(FILES)


def test_classes_made_of_the_words_of_others_are_a_notice(tmp_path: Path) -> None:
    rows = "path,label\nimages/b.jpg,scab\nimages/c.jpg,rust\nimages/d.jpg,scab rust\n"
    lists = {"train.csv": rows, "val.csv": "path,label\nimages/d.jpg,rust\n"}
    notes = noticed(write_lists(tmp_path / "set", lists))
    assert any(line.endswith("may be several others, while an image here has one: scab rust") for line in notes)
