"""One model's outputs for several methods, each with its own taps.

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
        """`taps`: method → its taps on this model, and `without_logits` those that read no logits. `name`: the model's.

        Raises ModelError: the model has no such tap.
        """
        self._model, self._name, self._without_logits = model, name, frozenset(without_logits)
        self._taps = {key: Taps(model, names, name=name, image_size=image_size) for key, names in taps.items() if names}
        self._keys = tuple(taps)

    def spec(self, key: str) -> ModelSpec:
        """The model as one method sees it."""
        return ModelSpec(self._model, self._taps[key].shapes if key in self._taps else (), self._name)

    def named_shapes(self, key: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The taps of one method by their full names, in its order, each with its shape."""
        taps = self._taps.get(key)
        return tuple(zip(taps.names, taps.shapes, strict=True)) if taps is not None else ()

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(path for taps in self._taps.values() for path in taps.modules)

    def capture(self) -> contextlib.ExitStack:
        """A context whose forward passes are captured, see `Taps.capture`."""
        stack = contextlib.ExitStack()
        for taps in self._taps.values():
            stack.enter_context(taps.capture())
        return stack

    def pop(self, output: Any, num_rows: int) -> dict[str, ModelOutputs]:
        """Method → the first `num_rows` rows of the logits and of its captured features, in float32 or wider.

        `output`: of the model, whose logits may be anything where no method reads them. The reader keeps no reference to it.
        """
        logits = None if self._without_logits.issuperset(self._keys) else _first_rows(logits_and_aux(output)[0], num_rows)
        features = {key: tuple(_first_rows(tensor, num_rows) for tensor in taps.pop()) for key, taps in self._taps.items()}
        return {key: ModelOutputs(None if key in self._without_logits else logits, features.get(key, ())) for key in self._keys}


def at_least_float32(tensor: Tensor) -> Tensor:
    """float32, or float64 unchanged: sums of half-precision numbers are not exact enough for a loss."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _first_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """The first rows in float32 or wider; the tensor itself where it has no more, so that it stays in its model's graph."""
    return at_least_float32(tensor if len(tensor) == num_rows else tensor[:num_rows])
