"""Named points of a model whose activations a method reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Taps:
    """Reads the outputs of named modules while a model runs."""

    def __init__(self, model: nn.Module, names: Sequence[str], *, name: str, image_size: int):
        self.names = tuple(names)
        self._kept: dict[str, Tensor] = {}
        self._on = False
        for path in self.names:
            model.get_submodule(path).register_forward_hook(lambda _m, _i, out, path=path: self._keep(path, out))  # type: ignore[misc]
        was = model.training
        with torch.no_grad(), self.reading():
            model.eval()(torch.zeros(2, 3, image_size, image_size, dtype=next(model.parameters()).dtype))
        model.train(was)
        self.shapes = tuple(tuple(feature.shape[1:]) for feature in self.take())

    def _keep(self, path: str, output: Any) -> None:
        if self._on:
            self._kept[path] = output

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def take(self) -> tuple[Tensor, ...]:
        taken = tuple(self._kept[path] for path in self.names)
        self._kept = {}
        return taken
