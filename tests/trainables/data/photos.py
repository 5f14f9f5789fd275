"""Images for tests: photos made up on the spot, and their encoded bytes."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

MakeFolder = Callable[..., Path]


def photo(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    """An RGB image with structure at every scale, different for every seed."""
    noise = np.random.default_rng(seed)
    coarse = Image.fromarray(noise.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    grain = noise.integers(-20, 21, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()
