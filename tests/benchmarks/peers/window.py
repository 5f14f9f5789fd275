"""How fast batches come. Knows nothing but the standard library, since foreign Pythons import it too."""

import time
from collections.abc import Iterator

BATCH, SIZE, THREADS = 64, 224, 2
WARM_UP_S = 2.0


def images_per_s(batches: Iterator[int], seconds: float) -> float:
    """Images a second over `seconds` after a warm-up; `batches` gives the number of images of each batch."""
    next(batches)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_UP_S * min(1.0, seconds):
        next(batches)
    began, num_images = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        num_images += next(batches)
    return num_images / (time.perf_counter() - began)
