"""Sources whose pixels lie in memory: `digits` and `synthetic`.

Shapes: N samples, M stored images, B samples of a read, H=W pixels, C=3 channels.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data.interface import Source
from trainables.data.order import Split
from trainables.errors import DataError

_VAL_EVERY = 5
_STORED_IMAGES = 64  # 9.2 MiB at 224 px: enough that a batch is not one image, and little memory for every worker


class MemorySource(Source):
    """N labelled RGB images, of which M ≤ N are stored: sample i shows stored image i mod M."""

    def __init__(
        self, title: str, *, classes: tuple[str, ...], labels_N: NDArray[np.int64], images_MHWC: NDArray[np.uint8]
    ) -> None:
        self._title, self.classes, self.labels_N, self.images_MHWC = title, classes, labels_N, images_MHWC
        self.size = int(images_MHWC.shape[1])

    def name(self, index: int) -> str:
        return f"{self._title}/{index}"

    def read(self, index: int) -> NDArray[np.uint8]:
        image_HWC: NDArray[np.uint8] = self.images_MHWC[index % len(self.images_MHWC)]
        return image_HWC

    def read_batch(self, indices_B: NDArray[np.int64], out_BHWC: NDArray[np.uint8]) -> None:
        """Copy these images into `out_BHWC` in one call: tiny images are read by the million."""
        np.take(self.images_MHWC, indices_B, axis=0, out=out_BHWC, mode="wrap")


def open_digits(split: Split) -> MemorySource:
    """The 1,797 real handwritten digits, 8×8, that scikit-learn ships (UCI "Optical Recognition of Handwritten Digits").

    Every fifth image of each class, in the file's order, validates (355 images); the others train (1,442).

    The split takes no random numbers, so no version of numpy can move an image from one side to the other.
    Gray values 0 … 16 become 0 … 255 in three equal channels. Raises DataError where scikit-learn is damaged.
    """
    table = _read_table()
    labels_N, gray_NHW = table[:, 64], table[:, :64].reshape(-1, 8, 8)
    nth_of_class_N = np.zeros(len(labels_N), dtype=np.int64)
    for label in range(10):
        of_class = labels_N == label
        nth_of_class_N[of_class] = np.arange(of_class.sum())
    validates_N = nth_of_class_N % _VAL_EVERY == _VAL_EVERY - 1
    chosen = np.flatnonzero(validates_N if split == "val" else ~validates_N)
    scaled_NHW = ((gray_NHW[chosen] * 255 + 8) // 16).astype(np.uint8)
    return MemorySource(
        f"digits/{split}",
        classes=tuple("0123456789"),
        labels_N=labels_N[chosen],
        images_MHWC=np.repeat(scaled_NHW[..., None], 3, axis=-1),
    )


def _read_table() -> NDArray[np.int64]:
    """The packaged table (1797, 65): 64 gray values 0 … 16 and a label. Importing scikit-learn itself costs over a second."""
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",", dtype=np.int64)
    raise DataError("data.path: digits: scikit-learn's digits.csv.gz is not installed; install scikit-learn again")


def open_synthetic(split: Split, num_images: int, num_classes: int, image_size: int) -> MemorySource:
    """Images that cost nothing to read, so that a run shows the upper bound of the loop.

    `num_images` training images of uniform noise, a fifth as many (at least 1) for validation; labels go round.

    Image and label of a sample are pure functions of (split, index): sample i shows noise image i mod 64.
    """
    num_samples = num_images if split == "train" else max(1, num_images // 5)
    noise = np.random.Generator(np.random.Philox(key=0 if split == "train" else 1))
    return MemorySource(
        f"synthetic/{split}",
        classes=tuple(str(label) for label in range(num_classes)),
        labels_N=np.arange(num_samples) % num_classes,
        images_MHWC=noise.integers(0, 256, (min(num_samples, _STORED_IMAGES), image_size, image_size, 3), dtype=np.uint8),
    )
