"""The frozen teacher: what it answers to a batch, for each method that reads it.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainables.methods.contract import Seen
from trainables.methods.pupil import Reader
from trainables.models.registry import logits_and_aux


class Teacher:
    """A model that runs beside the student, in eval mode and never trained."""

    def __init__(self, model: nn.Module, reader: Reader, *, gradient: bool = False):
        """`gradient`: the answers keep the graph that leads to them, for a method that differentiates the teacher."""
        self.model = model
        self._reader, self._gradient = reader, gradient

    def __call__(self, images_BCHW: Tensor, num_rows: int) -> dict[str, Seen]:
        """Method → the answer to the first `num_rows` images."""
        # Not inference mode, whose tensors a method's backward could not keep.
        with torch.set_grad_enabled(self._gradient), self._reader.reading():
            logits_BK = logits_and_aux(self.model(images_BCHW))[0]
            return self._reader.take(logits_BK, num_rows)
