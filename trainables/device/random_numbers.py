"""The random numbers of `trainables.data.augment.uniforms`, drawn on the device, bit for bit the same.

Shapes: B samples, U random numbers a sample. 64-bit words are int64, which adds and multiplies modulo 2^64.
"""

import numpy as np
import torch
from torch import Tensor

from trainables.data.order import GOLDEN, mix64

DEVICE_STREAM = 2**32
"""Added to the seed; an experiment's seeds are smaller."""


class Draws:
    """The random numbers of a batch: any column of a sample's stream, without those before it.

    A sample's stream is a function of (seed, epoch, index), and another one than the loader's, which cuts and flips.
    """

    def __init__(self, seed: int, epoch: int, indices_B: Tensor) -> None:
        seed_start = mix64(np.array([seed + DEVICE_STREAM], dtype=np.uint64))
        epoch_start = int(mix64(seed_start + np.uint64(epoch))[0])
        self._starts_B = _mix(indices_B + _signed(epoch_start))

    def columns(self, first: int, count: int) -> Tensor:
        """Columns [first, first + count) of the batch's random numbers: (B, count) in [0, 1), float64."""
        steps_U = torch.arange(first + 1, first + count + 1, device=self._starts_B.device) * _signed(GOLDEN)
        return _right(_mix(self._starts_B[:, None] + steps_U), 11).double() * 2.0**-53


def _mix(values: Tensor) -> Tensor:
    """SplitMix64's step and finalizer, elementwise."""
    values = values + _signed(GOLDEN)
    values = (values ^ _right(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _right(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _right(values, 31)


def _signed(word: int) -> int:
    """The int64 with the same bits as an unsigned word."""
    return word - 2**64 if word >= 2**63 else word


def _right(values: Tensor, bits: int) -> Tensor:
    """A logical shift: int64's own fills with the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
