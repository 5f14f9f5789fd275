"""Damaged images through every decoder that is installed: 64 px crops, `fast` and `exact`, and validation's view."""

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import numpy as np

from tests.fuzz.mutations import mutate
from tests.fuzz.originals import largest, originals, sizes, with_size
from tests.fuzz.subject import Input
from tests.trainables.data.decoders import DECODERS
from trainables.config import DataConfig
from trainables.data import augment as augment_module
from trainables.data.augment import Augment, uniforms
from trainables.data.jpeg import read_header

_SIZE = 64
_FILE = "image"


class Images:
    """See Subject."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._originals = originals()
        self._augments = {name: augments for name in DECODERS if (augments := _augments(name))}
        self._out_HWC = np.empty((_SIZE, _SIZE, 3), dtype=np.uint8)

    def make(self, index: int) -> Input:
        noise = np.random.default_rng([self._seed, index])
        others = list(self._originals.values())
        kind = list(self._originals)[int(noise.integers(len(others)))]
        whole, damage = self._originals[kind], []
        if noise.random() < 0.2:
            whole = with_size(whole, *sizes(noise))
            damage.append("sizes")
        if not damage or noise.random() < 0.3:
            name, whole = mutate(whole, others, noise)
            damage.append(name)
        return Input((kind.split()[0], " + ".join(damage)), {_FILE: whole})

    def calls(self, given: Input) -> Iterator[Callable[[], list[str]]]:
        data = given.files[_FILE]
        assert data is not None
        (crop,) = uniforms(self._seed, 0, np.array([len(data)]), 23)
        # what is no ordinary JPEG is PIL's, whichever the decoder
        names = list(self._augments) if read_header(data) else ["pil"]
        for name in names:
            for augment in self._augments[name]:
                yield partial(self._see, augment, data, crop)

    def _see(self, augment: Augment, data: bytes, crop: np.ndarray) -> list[str]:
        augment.render(data, crop[: augment.num_uniforms], self._out_HWC)
        return [""]


class Largest(Images):
    """The images that cost most, undamaged."""

    def make(self, index: int) -> Input:
        kind, make = list(largest().items())[index]
        return Input((kind, ""), {_FILE: make()})


def _augments(name: str) -> list[Augment]:
    """Training's two and validation's; none where the decoder is not installed."""
    try:
        decoder = DECODERS[name]()
    except ImportError:
        return []
    data = DataConfig(image_size=_SIZE, augment="crop_flip")
    exact = data.model_copy(update={"fidelity": "exact"})
    with patch.object(augment_module, "open_decoder", lambda: decoder):
        return [Augment(data, "train"), Augment(exact, "train"), Augment(data, "val")]
