import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from trainables.config import DataConfig
from trainables.data.source import open_source
from trainables.data.sources.memory import MemorySource, open_digits, open_synthetic
from trainables.notices import notices_to


def test_digits_are_those_of_scikit_learn_each_on_one_side() -> None:
    train, val = open_digits("train"), open_digits("val")
    theirs = load_digits()
    gray = np.rint(theirs.images * 255 / 16).astype(np.uint8)
    expected = sorted((label, image.tobytes()) for label, image in zip(theirs.target.tolist(), gray, strict=True))
    ours = sorted(
        (int(label), np.asarray(source.read(index))[..., 1].tobytes())
        for source in (train, val)
        for index, label in enumerate(source.labels_N)
    )
    assert ours == expected
    assert (len(train), len(val)) == (1442, 355)
    assert train.classes == val.classes == tuple("0123456789")


def test_digits_have_a_fifth_of_each_class_in_validation_and_three_equal_channels() -> None:
    train, val = open_digits("train"), open_digits("val")
    share = np.bincount(val.labels_N) / (np.bincount(train.labels_N) + np.bincount(val.labels_N))
    assert share == pytest.approx(0.2, abs=0.01)
    assert (train.images_MHWC == train.images_MHWC[..., :1]).all()
    assert (train.images_MHWC.min(), train.images_MHWC.max()) == (0, 255)


def test_digits_do_not_import_scikit_learn() -> None:
    code = (
        "import sys; from trainables.data.sources.memory import open_digits; open_digits('val');"
        "sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_synthetic_images_are_a_function_of_split_and_index() -> None:
    first, again = (open_synthetic("train", 300, 7, 13) for _ in range(2))
    assert (first.images_MHWC == again.images_MHWC).all()
    assert first.labels_N.tolist() == [index % 7 for index in range(300)]
    assert first.read(299).shape == (13, 13, 3)
    assert first.read(3).tobytes() == again.read(3).tobytes() != first.read(4).tobytes()
    assert open_synthetic("val", 300, 7, 13).read(3).tobytes() != first.read(3).tobytes()


@pytest.mark.parametrize(("num_images", "num_val"), [(1, 1), (4, 1), (5, 1), (300, 60)])
def test_synthetic_validation_is_a_fifth_and_at_least_one(num_images: int, num_val: int) -> None:
    data = DataConfig(path="synthetic", synthetic_images=num_images, synthetic_classes=3, image_size=5)
    assert len(open_source(data, "train")) == num_images
    val = open_source(data, "val")
    assert len(val) == num_val
    assert val.classes == open_source(data, "train").classes == ("0", "1", "2")


@pytest.mark.parametrize("source", [open_digits("val"), open_synthetic("train", 200, 3, 6)], ids=["digits", "synthetic"])
def test_a_batch_holds_the_pixels_that_single_reads_give(source: MemorySource) -> None:
    indices_B = np.array([len(source) - 1, 0, 70, 70, 3])
    out_BHWC = np.empty((5, source.size, source.size, 3), dtype=np.uint8)
    source.read_batch(indices_B, out_BHWC)
    for image_HWC, index in zip(out_BHWC, indices_B, strict=True):
        assert (image_HWC == source.read(int(index))).all()


def test_a_folder_of_a_data_sets_name_is_not_read_without_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    with notices_to(lines.append):
        open_source(DataConfig(path="digits"), "val")
    assert lines == ["data.path: digits is the built-in data set, not the folder; for the folder, write ./digits"]
