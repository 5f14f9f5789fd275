"""A model whose blocks sleep instead of computing: stages of any number run at once, however few cores there are."""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BLOCKS, CHANNELS = 8, 64


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SleepingBlock(nn.Module):
    """Takes a fixed time and one for each sample."""

    def __init__(self, fixed_s: float, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.fixed_s, self.forward_s, self.backward_s = fixed_s, forward_s, backward_s

    def extra_repr(self) -> str:
        return f"{self.fixed_s}, {self.forward_s}, {self.backward_s}"

    def forward(self, x: Tensor) -> Tensor:
        seconds = [self.fixed_s + len(x) * each_s for each_s in (self.forward_s, self.backward_s)]
        result: Tensor = _Sleep.apply(x * self.weight, *seconds)
        return result


def sleeping_model(seed: int, num_classes: int) -> nn.Module:
    """Blocks of random times, in the mean some 50 ms for a batch of 32 forward and twice that backward."""
    rng = np.random.default_rng(seed)
    blocks = [SleepingBlock(rng.uniform(0, 5e-3), rng.uniform(0, 3e-3), rng.uniform(0, 6e-3)) for _ in range(BLOCKS)]
    head = [nn.Conv2d(3, CHANNELS, 1, stride=4), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, num_classes)]
    return nn.Sequential(*head)
