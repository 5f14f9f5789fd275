"""The outputs of one model for several methods, each with taps of its own.

Shapes: B samples of this rank, K classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainables.methods.contract import ModelOutputs
from trainables.models.taps import Taps


class Reader:
    """What several methods read of one model, each at taps of its own."""

    def __init__(self, model: nn.Module, wanted: Mapping[str, Sequence[str]], *, name: str, image_size: int):
        """`wanted`: method → its taps. Raises ModelError where the model has no such point."""
        self.name = name
        self._taps = {key: Taps(model, names, name=name, image_size=image_size) for key, names in wanted.items() if names}
        self.shapes = {key: self._taps[key].shapes if key in self._taps else () for key in wanted}

    def reading(self) -> contextlib.ExitStack:
        """A context in which the model's forward is read."""
        stack = contextlib.ExitStack()
        for taps in self._taps.values():
            stack.enter_context(taps.reading())
        return stack

    def take(self, logits_BK: Tensor, num_rows: int) -> dict[str, ModelOutputs]:
        """For each method what the last forward gave, in float32 or wider, its first `num_rows` rows; the model is let go of."""
        logits_BK = _first(logits_BK, num_rows)
        found = {key: tuple(_first(tensor, num_rows) for tensor in taps.take()) for key, taps in self._taps.items()}
        return {key: ModelOutputs(logits_BK, found.get(key, ())) for key in self.shapes}


def widened(tensor: Tensor) -> Tensor:
    """In float32, unless it is wider: sums of half-precision numbers are not exact enough for a loss."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _first(tensor: Tensor, num_rows: int) -> Tensor:
    """The first rows, widened; the tensor itself where that is all of it, so that it stays a part of its model's graph."""
    return widened(tensor if len(tensor) == num_rows else tensor[:num_rows])
