"""The frozen teacher network, on the student's device.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

import torch
from torch import Tensor, nn

from trainables.distributed.batch_norm import GlobalBatchNorm
from trainables.methods.contract import ModelOutputs
from trainables.methods.tap_reader import TapReader
from trainables.models.forward import logits_and_aux
from trainables.teachers.interface import TeacherInterface, TeacherRequest


class TeacherNetwork(TeacherInterface):
    """A frozen model in eval mode, but for batch norms that use the statistics of the batch."""

    def __init__(self, model: nn.Module, reader: TapReader, *, gradient: bool = False):
        """`gradient`: the outputs keep their graph, for a method that differentiates the teacher."""
        self.model = model
        self._reader, self._gradient = reader, gradient
        self._batch_norms = [module for module in model.modules() if isinstance(module, GlobalBatchNorm)]

    @property
    def tapped_modules(self) -> frozenset[str]:
        """The paths of the network's modules that methods read."""
        return self._reader.modules

    def skip(self, images_BCHW: Tensor, num_calls: int) -> None:
        """See `TeacherInterface`; a sharded network runs, so that other ranks get this rank's part of the parameters."""
        for _ in range(num_calls if self.is_collective else 0):
            self(images_BCHW[:1], 0)

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """See `TeacherInterface`; it runs for whatever images it gets."""
        for norm in self._batch_norms:  # dummy images form no batch, and one rank may run some alone
            norm.train(request is not None)
        if self._batch_norms:  # the dummy image of a rank without samples is no part of the batch
            images_BCHW = images_BCHW[:num_rows]
        if self._gradient:  # the parameters are frozen: the graph starts at the images
            images_BCHW = images_BCHW.detach().requires_grad_()
        # Not inference mode: a method's backward cannot use its tensors.
        with torch.set_grad_enabled(self._gradient), self._reader.capture():
            logits_BK = logits_and_aux(self.model(images_BCHW))[0]
            return self._reader.pop(logits_BK, num_rows)
