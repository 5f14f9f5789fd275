"""Knowledge Distillation with the Reused Teacher Classifier: Chen, Mei, Zhang, Wang, Feng and Chen 2022 (CVPR), section 3.

The student predicts with the teacher's classifier: a projector P maps its last map to the teacher's channels, and the teacher's
classifier is applied to the mean over positions. Only the map is learned (equation 4):

    L = mean over C, H and W of (F_t − P(F_s))²

There is no loss on labels. The student becomes the model STUDENT+TEACHER of `models.reused_classifier`, which includes the
projector and the classifier and is evaluated, saved and exported. So the projector's batch norms are a student's: they normalize
over each worker's images, unless `scale.sync_batch_norm` is set. As in the authors' code, P is 1×1, 3×3 and 1×1 convolutions with
batch norm and ReLU, and the larger of two maps is averaged to the smaller one's size. The maps are those before pooling; a
student with hidden layers after its pooling (VGG, MobileNetV3) is read after its last stage.

Shapes: B batch, C channels, H W positions.
"""

import torch
from torch import Tensor

from trainables.config import MethodOptions
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements, mean_per_sample
from trainables.methods.features import equal_channels, paired_maps, pooled_alike


class SimKDOptions(MethodOptions):
    """The authors' setup: only this loss, with weight 1."""

    student_taps: tuple[str, ...] = ("projector",)
    teacher_taps: tuple[str, ...] = ("unpooled",)


class SimKD(Method):
    """mean (teacher's last map − student's, projected)²; predictions come from the teacher's classifier."""

    Options = SimKDOptions
    terms = ("feature",)
    requires = Requirements(logits=False, reuses_classifier=True)
    task_weight = 0.0

    def __init__(self, options: SimKDOptions, context: BuildContext) -> None:
        """Raises ExperimentError: the maps at the taps do not match."""
        super().__init__(options, context)
        pairs = paired_maps("simkd", context)
        equal_channels("simkd", pairs)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `feature` of each sample, (B,)."""
        pairs = zip(student.features, teacher.features, strict=True)
        return {"feature": torch.stack([_distance(*pair) for pair in pairs]).sum(0)}


def _distance(student_BCHW: Tensor, teacher_BCHW: Tensor) -> Tensor:
    source_BCHW, target_BCHW = pooled_alike(student_BCHW, teacher_BCHW)
    return mean_per_sample((source_BCHW - target_BCHW).square())
