"""Image folders for tests."""

from pathlib import Path

from PIL import Image

from trainables.config import DataConfig
from trainables.data.interface import Source
from trainables.data.source import open_source


def write_images(root: Path, num_train: int = 4, classes: str = "ab") -> Path:
    """A folder of so many training images of each class, and two for validation. Returns it."""
    for split, count in (("train", num_train), ("val", 2)):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                Image.new("RGB", (8, 8), (number, label, 0)).save(root / split / name / f"{number}.png")
    return root


def open_folder(root: Path | str, split: str) -> Source:
    """One split of a folder of images, as training opens it."""
    return open_source(DataConfig(path=str(root)), split)  # type: ignore[arg-type]
