"""Images whose decoding is a sleep, for `launches`. A loader process imports this, and no torch with it."""

import time

import numpy as np
from numpy.typing import NDArray

from trainables.data.interface import Source

SIZE = 32
_DECODE_S = 0.001


class SleepingSource(Source):
    """Images whose decoding is a sleep."""

    classes = ("only",)

    def __init__(self, num_samples: int) -> None:
        self.labels_N = np.zeros(num_samples, dtype=np.int64)

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> NDArray[np.uint8]:
        time.sleep(_DECODE_S)
        return np.zeros((SIZE, SIZE, 3), dtype=np.uint8)
