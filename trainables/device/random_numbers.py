"""The random numbers of `trainables.data.augment.uniforms`, drawn on the device, bit for bit the same.

Shapes: B samples, U random numbers a sample. 64-bit words are int64, which adds and multiplies modulo 2^64.
"""

import torch
from torch import Tensor

from trainables.data.augment import epoch_start, stream_start
from trainables.data.order import GOLDEN


class Draws:
    """The random numbers of a batch, a pure function of (seed, epoch, view, name): no name changes what another one draws."""

    def __init__(self, seed: int, epoch: int, views_B: Tensor) -> None:
        self._starts_B = _mix(views_B + _signed(epoch_start(seed, epoch)))

    def uniforms(self, name: str, count: int) -> Tensor:
        """The first `count` numbers of `name` for each sample: (B, count) in [0, 1), float64."""
        steps_U = torch.arange(1, count + 1, device=self._starts_B.device) * _signed(GOLDEN) + _signed(stream_start(name))
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
