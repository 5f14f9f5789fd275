"""The frozen teacher: what it answers to a batch, for each method that reads it.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn

from trainables.data.loader import Batch
from trainables.distributed.batch_norm import GlobalBatchNorm
from trainables.methods.contract import ModelOutputs
from trainables.methods.tap_reader import TapReader
from trainables.models.forward import logits_and_aux
from trainables.teachers.interface import TeacherRequest


class Teacher:
    """A model that runs beside the student and is never trained; in eval mode, but for batch norms that go by the batch."""

    def __init__(self, model: nn.Module, reader: TapReader, *, gradient: bool = False):
        """`gradient`: the answers keep the graph that leads to them, for a method that differentiates the teacher."""
        self.model = model
        self._reader, self._gradient = reader, gradient
        self._by_batch = [module for module in model.modules() if isinstance(module, GlobalBatchNorm)]

    def __call__(self, images_BCHW: Tensor, num_rows: int, asked: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """See `TeacherInterface`: it answers whatever images it is shown."""
        for norm in self._by_batch:  # images that are no samples are no batch either, and a rank may show some on its own
            norm.train(asked is not None)
        if self._by_batch:  # a blank image of a rank without samples is no part of the batch
            images_BCHW = images_BCHW[:num_rows]
        if self._gradient:  # the graph begins somewhere: its parameters are frozen
            images_BCHW = images_BCHW.detach().requires_grad_()
        # Not inference mode, whose tensors a method's backward could not keep.
        with torch.set_grad_enabled(self._gradient), self._reader.capture():
            logits_BK = logits_and_aux(self.model(images_BCHW))[0]
            return self._reader.pop(logits_BK, num_rows)

    def ahead(self, batches: Generator[Batch, None, None], epoch: int) -> Generator[Batch, None, None]:
        """See `TeacherInterface`."""
        return batches

    def end_epoch(self) -> None:
        """Nothing of it is kept."""

    def close(self) -> None:
        """There is nothing to let go of."""
