"""PS-KD, progressive self-knowledge distillation: Kim, Ji, Yoon and Hwang 2021 (ICCV), equations 5 and 6.

In epoch e = 1 … E a sample's target is (1 − α_e)·one-hot + α_e·P_{e−1} with α_e = α·e/E. P_{e−1} is the student's output for it
in the previous epoch, in training mode and for that epoch's crop, as in the authors' code. P_0 is the one-hot label, so in the
first epoch the loss is the cross-entropy. It replaces the task's loss, whose weight is therefore 0.

The softmax of every training sample is stored by its dataset-wide index: 4·M·K bytes on every worker's device and in each
checkpoint, 20 MB for CIFAR-100 and 5 GB for ImageNet. A sample's row is updated when it is trained on; one that an epoch leaves
out (`data.last_batch: drop`) keeps an earlier one.

Shapes: B samples of this rank, N of all ranks, K classes, M training samples.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from trainables.config import MethodOptions, Probability
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements


class PSKDOptions(MethodOptions):
    """The paper's α = 0.8."""

    alpha: Probability = Field(0.8, description="share of the target that is the student's own output in the last epoch")


class PSKD(Method):
    """Cross-entropy with the target (1 − α_e)·one-hot + α_e·(the student's softmax of the last epoch), α_e = α·e/E."""

    Options = PSKDOptions
    options: PSKDOptions
    terms = ("self_ce",)
    requires = Requirements(teacher=False, hard_labels=True, all_gather=True, same_images=True)
    task_weight = 0.0

    def __init__(self, options: PSKDOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._epochs = context.epochs
        self.register_buffer("last_MK", F.one_hot(context.labels_M, context.num_classes).float())

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `self_ce` of each sample, (B,). In training mode the samples' softmax is then stored on all ranks."""
        last_MK = self.get_buffer("last_MK")
        alpha = self.options.alpha * min((int(batch.epoch) + 1) / self._epochs, 1.0)
        log_BK = student.logits_BK.log_softmax(1)
        one_hot_BK = torch.zeros_like(log_BK).scatter_(1, batch.labels_B[:, None], 1.0)
        target_BK = (1 - alpha) * one_hot_BK + alpha * last_MK[batch.indices_B]
        if self.training:
            with torch.no_grad():
                indices_N, softmax_NK = batch.all_gather(batch.indices_B), batch.all_gather(log_BK.detach().exp())
                last_MK.index_copy_(0, indices_N, softmax_NK.to(last_MK.dtype))
        return {"self_ce": -(target_BK * log_BK).sum(1)}
