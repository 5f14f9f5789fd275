"""Deep mutual learning: Zhang, Xiang, Hospedales and Lu 2018 (CVPR), equations 3 to 8, for two networks.

L₁ = CE(p₁, y) + KL(p₂ ‖ p₁) and L₂ = CE(p₂, y) + KL(p₁ ‖ p₂), with the other network's output detached. The cross-entropy of the
first, the student, is the task's. Deviation: the paper updates one network and runs it again for the other's loss; here, as in
most implementations, both losses use one forward pass of each network.

The peer is an auxiliary module: trained with the student and saved in the checkpoint, but not exported. It runs in float32
(float64 in a float64 job), even if the student runs in bf16 or fp16, and is not compiled. Its batch norms are synchronized if the
student's are. The method's `weight` also scales the peer's losses.

Shapes: B batch, C channels, H W pixels, K classes.
"""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from trainables.config import MethodOptions, Positive
from trainables.distributed.batch_norm import accepts_empty_batches, convert, has_global_batch_norm
from trainables.errors import ExperimentError, ModelError
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.kd import soft_loss
from trainables.models.forward import logits_and_aux
from trainables.models.pixels import take_pixels
from trainables.models.registry import build_model


class DMLOptions(MethodOptions):
    """The paper's values: T = 1, and equal weights."""

    peer: str | None = Field(
        None, min_length=1, description="the other network's model; absent: the student's, initialized differently"
    )
    temperature: Positive = Field(1.0, description="T, by which logits are divided")


class DML(Method):
    """T²·KL(peer ‖ student) for the student; CE + T²·KL(student ‖ peer) for the peer, a network that begins as it does."""

    Options = DMLOptions
    options: DMLOptions
    terms = ("student_kl", "peer_ce", "peer_kl")
    requires = Requirements(teacher=False, hard_labels=True)

    def __init__(self, options: DMLOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        name, size = options.peer or context.student.name, context.image_size
        try:
            peer = build_model(name, num_classes=context.num_classes, image_size=size, seed=context.seed + 1)
        except ModelError as error:
            raise ExperimentError(f"distill.options.dml.peer: {error}") from error
        take_pixels(peer, context.input)
        self.peer = convert(peer, context.group) if has_global_batch_norm(context.student.model) else peer
        # Other batch norms fail on an empty batch: use two blank images, whose outputs are dropped.
        self._dummy_batch_size = 0 if accepts_empty_batches(self.peer) else 2

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `student_kl`, `peer_ce` and `peer_kl` of each sample, (B,)."""
        rows, images_BCHW = len(batch.labels_B), batch.images_BCHW
        if not rows:
            images_BCHW = images_BCHW.new_zeros((self._dummy_batch_size, *images_BCHW.shape[1:]))
        peer_BK, aux = logits_and_aux(self.peer(images_BCHW))
        peer_BK, temperature = peer_BK[:rows], self.options.temperature
        peer_ce_B = F.cross_entropy(peer_BK, batch.labels_B, reduction="none")
        for weight, aux_BK in aux:
            peer_ce_B = peer_ce_B + weight * F.cross_entropy(aux_BK[:rows], batch.labels_B, reduction="none")
        return {
            "student_kl": soft_loss(student.logits_BK, peer_BK.detach(), temperature),
            "peer_ce": peer_ce_B,
            "peer_kl": soft_loss(peer_BK, student.logits_BK.detach(), temperature),
        }
