"""`distill data`: what a packed set holds, told without reading its images, and a sheet of them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.service.commands import run
from tests.trainables.data.packed import pack_here
from tests.trainables.data.photos import photo
from trainables.data.pack.modes import Mode


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """60 training photos of cats, 1 of a dog, and 2 for validation."""
    root = tmp_path / "images"
    for split, name, count in (("train", "cat", 60), ("train", "dog", 1), ("val", "cat", 2)):
        folder = root / split / name
        folder.mkdir(parents=True)
        for number in range(count):
            photo(number, 40 + number, 32).save(folder / f"{number:03}.jpg")
    (root / "train" / "cat" / "bad.jpg").write_bytes(b"no image")
    pack_here(root, tmp_path / "packed", Mode(max_side=90))
    return tmp_path / "packed"


def cells(text: str, first: str) -> list[str]:
    """The cells of the row that begins with `first`."""
    return next(row for line in text.splitlines() if (row := line.replace("│", " ").split())[:1] == [first])


def test_counts_sizes_and_shapes_are_shown(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "data", packed)
    assert (code, err) == (0, "")
    assert "image folder images, --max-side 90 --quality 90, by raydistill 0" in out
    assert "images as files; 1 unreadable skipped; 2 classes" in out
    assert cells(out, "train")[1:5] == ["61", "2", "1–60", "1"]
    assert cells(out, "val")[1:5] == ["2", "1", "0–2", "1"]
    assert cells(out, "0") == ["0", "cat", "60", "2"]
    assert cells(out, "1") == ["1", "dog", "1", "0"]
    assert cells(out, "shorter")[3:] == ["29", "30", "32", "32", "32"]
    assert cells(out, "width")[3:] == ["1.25", "1.31", "2.16", "3.00", "3.10"]


def test_of_many_classes_the_rarest_and_the_commonest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        for label in range(25):
            (tmp_path / "images" / split / f"c{label:02}").mkdir(parents=True)
            for number in range(1 + label % 3):
                photo(label).save(tmp_path / "images" / split / f"c{label:02}" / f"{number}.png")
    pack_here(tmp_path / "images", tmp_path / "packed")
    _, out, _ = run(capsys, "data", tmp_path / "packed")
    assert "classes with the fewest and the most train images, 20 of 25" in out
    assert cells(out, "0") == ["0", "c00", "1", "1"]
    assert cells(out, "23") == ["23", "c23", "3", "3"]


def test_names_of_classes_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["[bold]", "[cat]", "dog[1]", "[", "a]:smile:", "x\\"]
    for split in ("train", "val"):
        for name in names:
            (tmp_path / "images" / split / name).mkdir(parents=True)
            photo(1).save(tmp_path / "images" / split / name / "0.jpg")
    (tmp_path / "images").rename(tmp_path / "[red]")
    pack_here(tmp_path / "[red]", tmp_path / "packed")
    code, out, _ = run(capsys, "data", tmp_path / "packed")
    assert code == 0
    assert "image folder [red], as is" in out
    for label, name in enumerate(sorted(names)):
        assert cells(out, str(label)) == [str(label), name, "1", "1"]


def test_a_sheet_shows_pictures_of_the_whole_split_with_their_classes(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = packed.parent / "sheet.png"
    code, out, _ = run(capsys, "data", packed, "--sheet", sheet)
    assert code == 0
    assert f"48 pictures: {sheet}" in out
    with Image.open(sheet) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (6 * 142, 8 * 128, 3)
    tiles = pixels.reshape(6, 142, 8, 128, 3)[:, :128].transpose(0, 2, 1, 3, 4)
    assert (tiles.std(axis=(2, 3, 4)) > 10).all()  # a photo in each


def test_verify_reads_every_checksum(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "data", packed, "--verify")
    assert code == 0
    assert "every checksum of 4 files is right" in out
    shard = packed / "train-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, _, err = run(capsys, "data", packed, "--verify")
    assert code == 2
    assert err == f"error: {shard} does not match the checksum in its index: copy the set again, or remove it and pack it again\n"


def test_a_folder_that_is_no_packed_set_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "data", tmp_path)
    assert (code, out) == (2, "")
    assert "index.json cannot be read: No such file or directory; give a folder that `distill pack` made" in err


def test_a_set_without_labels_is_shown_without_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(40):
        photo(number).save(tmp_path / "photos" / f"{number:02}.jpg")
    code, out, err = run(capsys, "pack", tmp_path / "photos", tmp_path / "packed", "--no-labels", "--val-share", 0.25)
    assert (code, "30 train, 10 val images without labels in 2 shards" in out) == (0, True), out
    assert "note: data.val_share: 10 of 40 images are held out for validation, by a hash of their paths" in err
    code, out, err = run(capsys, "data", tmp_path / "packed", "--sheet", tmp_path / "sheet.png")
    assert (code, err) == (0, "")
    assert "images as files; 0 unreadable skipped; without labels" in out
    assert cells(out, "train")[1:3] == ["30", "1"]
    assert "class" not in out
    assert "30 pictures" in out
