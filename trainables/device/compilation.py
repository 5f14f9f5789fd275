"""`train.compile`: which batches run through torch.compile, and the marks that its CUDA graphs need."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from trainables.config import TrainConfig

Mode = bool | Literal["reduce-overhead", "max-autotune"]


def compile_model(model: nn.Module, mode: Mode) -> None:
    """Compile a model in place, so that the names in its state stay as they are. Taps go in before that, DDP around it after."""
    if mode:
        model.compile(mode=None if mode is True else mode)


@dataclass(frozen=True)
class Compilation:
    """Batches of the regular sizes run compiled, all others eagerly: short ones at an epoch's end, uneven and empty ones.

    Each other size would be compiled anew, which takes longer than an epoch of a small model. They are not padded: padding would
    enter the statistics of batch norms, and the relations between samples.
    """

    mode: Mode = False
    sizes: frozenset[int] = frozenset()
    """Images of the micro-batches of a full batch; accumulation may divide it into two sizes."""

    @classmethod
    def of(cls, config: TrainConfig) -> Compilation:
        local, parts = config.data.global_batch_size // config.scale.num_replicas, config.optim.accumulate
        return cls(config.train.compile, frozenset({local // parts, -(-local // parts)}))

    @property
    def uses_cuda_graphs(self) -> bool:
        return self.mode in ("reduce-overhead", "max-autotune")

    def begin_step(self) -> None:
        """Every step, and every batch of an evaluation, calls it: what compiled models gave before may be overwritten from here.

        CUDA graphs keep the outputs of a step's calls until then, those of the teacher and of earlier micro-batches included.
        """
        if self.uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def batch(self, num_images: int, *, eager: bool = False) -> contextlib.AbstractContextManager[object]:
        """Forward passes on so many images run in this context; `eager`: uncompiled, whatever their number."""
        if not self.mode or (num_images in self.sizes and not eager):
            return contextlib.nullcontext()
        uncompiled: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return uncompiled
