"""Parts of images for the decoders' tests."""

import numpy as np

from trainables.data.jpeg import Box


def random_boxes(width: int, height: int, count: int) -> list[Box]:
    """The same at each call, of at least a pixel."""
    noise = np.random.default_rng(3)
    boxes = []
    for _ in range(count):
        left, top = int(noise.integers(width)), int(noise.integers(height))
        boxes.append((left, top, int(noise.integers(left + 1, width + 1)), int(noise.integers(top + 1, height + 1))))
    return boxes
