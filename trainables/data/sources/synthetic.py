"""`synthetic`: images that cost nothing to read, so that a run shows the upper bound of the loop.

Shapes: N samples, M stored images, C=3 H=W pixels.
"""

import numpy as np

from trainables.data.order import Split
from trainables.data.sources.memory_source import MemorySource

_STORED_IMAGES = 64  # 9.2 MiB at 224 px: enough that a batch is not one image, and little memory for every worker


def open_synthetic(split: Split, num_images: int, num_classes: int, image_size: int) -> MemorySource:
    """`num_images` training images of uniform noise, a fifth as many (at least 1) for validation; labels go round.

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
