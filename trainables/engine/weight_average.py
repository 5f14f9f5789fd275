"""An exponential moving average (EMA) of the weights of a student and its methods, which is evaluated and saved.

As in timm's ModelEmaV3 with warm-up: after step n (from 0), a ← d·a + (1 - d)·w with d = min(decay, 1 - (1 + n)^(-2/3)).
Floating-point buffers (batch norm statistics) are averaged too. Other buffers, and methods' memories of images and losses, are
not averaged.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """Averages of a student and its methods, on their device. They need the memory of the weights, in `swapped` twice that."""

    def __init__(self, student: nn.Module, methods: nn.ModuleDict, decay: float) -> None:
        self._decay = decay
        state = {f"model.{name}": tensor for name, tensor in student.state_dict().items()}
        averaged = {name for name, _ in methods.named_parameters(remove_duplicate=False)}
        for prefix, module in methods.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                averaged |= {f"{prefix}.{name}" for name, _ in module.named_buffers()}
        state |= {f"method.{name}": tensor for name, tensor in methods.state_dict().items() if name in averaged}
        self._weights = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        self.tensors = {name: tensor.clone() for name, tensor in self._weights.items()}
        """The averages by their names in a checkpoint."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after the step with index `step` (0-based)."""
        decay = min(self._decay, 1 - (1 + step) ** (-2 / 3))
        get_ema_multi_avg_fn(decay)([*self.tensors.values()], [*self._weights.values()], None)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """A context in which the models use the averages, in the same memory, as compiled code expects."""
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
