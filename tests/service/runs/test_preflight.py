"""What is odd about data is one line before a run begins."""

import shutil
from pathlib import Path

from service.config.experiment import load
from service.runs.preflight import check_data
from tests.trainables.data.image_folder import write_images
from trainables.notices import notices_to


def noticed(folder: Path) -> list[str]:
    lines: list[str] = []
    overrides = [
        f"data.path={folder}",
        "data.image_size=8",
        "data.global_batch_size=2",
        "student.model=mlp_small",
        "teacher=null",
    ]
    with notices_to(lines.append):
        check_data(load("digits", overrides))
    return [line for line in lines if line.startswith("data.path")]


def test_validation_images_that_are_the_training_images_are_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    assert noticed(folder) == []
    shutil.rmtree(folder / "val")
    (folder / "val").symlink_to("train")
    says = f"data.path: {folder}: the validation images are the training images: accuracy on them says little"
    assert noticed(folder) == [says]


def test_more_validation_than_training_images_may_be_swapped_splits(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", num_train=1)
    assert noticed(folder) == [f"data.path: {folder} has 2 training and 4 validation images: are they swapped?"]
