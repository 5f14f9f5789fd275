"""`digits`: the 1,797 real handwritten digits, 8×8, that scikit-learn ships (UCI "Optical Recognition of Handwritten Digits").

Shapes: N samples, C=3 H=W=8 pixels.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data.order import Split
from trainables.data.sources.memory_source import MemorySource
from trainables.errors import DataError

_VAL_EVERY = 5


def open_digits(split: Split) -> MemorySource:
    """Every fifth image of each class, in the file's order, validates (355 images); the others train (1,442).

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
