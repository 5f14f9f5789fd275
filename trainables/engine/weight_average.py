"""An exponential moving average of a model's weights, which is evaluated and kept for use in place of the weights themselves.

As timm's ModelEmaV3 with warm-up: after the n-th step a ← d·a + (1 - d)·w with d = min(decay, 1 - (1 + n)^(-2/3)), n from 0; of
floating-point buffers (statistics of batch norm) too, and others as they are.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """The averages of one model, which is on its device already. The memory: that of its weights, and in `swapped` once more."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
        self.tensors = {name: tensor.clone() for name, tensor in self._weights.items()}
        """By the names of the model's state."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after the step with this index (0-based)."""
        decay = min(self._decay, 1 - (1 + step) ** (-2 / 3))
        get_ema_multi_avg_fn(decay)([*self.tensors.values()], [*self._weights.values()], None)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the context the model has the averages as its weights, in the same memory, as compiled code expects."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        weights, averages = [*self._weights.values()], [*self.tensors.values()]
        before = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        torch._foreach_copy_(averages, before)
