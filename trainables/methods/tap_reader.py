"""Read one model's outputs for several methods, each with its own taps.

Shapes: B samples of this rank, K classes.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainables.methods.contract import ModelOutputs, ModelSpec
from trainables.models.forward import logits_and_aux
from trainables.models.taps import Taps


class TapReader:
    """The taps of several methods on one model."""

    def __init__(
        self,
        model: nn.Module,
        taps: Mapping[str, Sequence[str]],
        *,
        name: str,
        image_size: int,
        without_logits: Collection[str] = (),
    ):
        """`taps` maps each method to its taps on this model; `without_logits` are the methods that read no logits.

        Raises ModelError: the model has no such tap.
        """
        self._model, self._name, self._without_logits = model, name, frozenset(without_logits)
        self._taps = {key: Taps(model, names, name=name, image_size=image_size) for key, names in taps.items() if names}
        self._keys = tuple(taps)

    def spec(self, key: str) -> ModelSpec:
        """Return the model's spec for one method."""
        return ModelSpec(self._model, self._taps[key].shapes if key in self._taps else (), self._name)

    def named_shapes(self, key: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return one method's taps in order, as (expanded name, shape)."""
        taps = self._taps.get(key)
        return tuple(zip(taps.names, taps.shapes, strict=True)) if taps is not None else ()

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(path for taps in self._taps.values() for path in taps.modules)

    def capture(self) -> contextlib.ExitStack:
        """Return a context that captures forward passes, see `Taps.capture`."""
        stack = contextlib.ExitStack()
        for taps in self._taps.values():
            stack.enter_context(taps.capture())
        return stack

    def pop(self, output: Any, num_rows: int) -> dict[str, ModelOutputs]:
        """Return for each method the first `num_rows` rows of the logits and its captured features, in float32 or wider.

        `output` is the model's and may have any form if no method reads logits. The reader drops its references.
        """
        logits = None if self._without_logits.issuperset(self._keys) else _first_rows(logits_and_aux(output)[0], num_rows)
        features = {key: tuple(_first_rows(tensor, num_rows) for tensor in taps.pop()) for key, taps in self._taps.items()}
        return {key: ModelOutputs(None if key in self._without_logits else logits, features.get(key, ())) for key in self._keys}


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert to float32, except float64: half precision is too inexact for a loss."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _first_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """Slice the first rows in float32 or wider; a tensor with no more rows is not sliced."""
    return at_least_float32(tensor if len(tensor) == num_rows else tensor[:num_rows])
