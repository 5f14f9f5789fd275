from pathlib import Path

import pytest

from tests.trainables.data.photos import MakeFolder, photo


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """make_folder(train={"cat": 3}, val={"cat": 1}) writes so many JPEG photos and returns the root."""

    def make(**splits: dict[str, int]) -> Path:
        root, seed = tmp_path / "images", 0
        root.mkdir(exist_ok=True)
        for split, classes in splits.items():
            for name, count in classes.items():
                folder = root / split / name
                folder.mkdir(parents=True)
                for number in range(count):
                    seed += 1
                    photo(seed, width=30 + seed % 7, height=28 + seed % 5).save(folder / f"{number:03}.jpg", quality=90)
        return root

    return make
