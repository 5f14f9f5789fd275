"""What decodes JPEG, by its name."""

from collections.abc import Callable

import pytest

from trainables.data.turbojpeg import TurboJpeg

DECODERS: dict[str, Callable[[], TurboJpeg | None]] = {"turbojpeg": TurboJpeg, "pil": lambda: None}


def decoder_or_skip(name: str) -> TurboJpeg | None:
    """The decoder of this name; the test is skipped where it is not installed."""
    try:
        return DECODERS[name]()
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")
