"""Knowledge Distillation via Softmax Regression Representation Learning: Yang, Martinez, Bulat and Tzimiropoulos 2021 (ICLR),
section 3.

h_t is the input of the teacher's classifier (W, b), and h_s a connector's output for the student's last map: 1×1 convolution,
batch norm, ReLU, mean over positions. There are two losses:

    L_FM = mean over D of (h_t − h_s)²                  the features match
    L_SR = mean over K of (z_t − (W·h_s + b))²          the teacher's classifier gives the same logits, z_t

The classifier is frozen; L_SR's gradient flows through it to h_s. This follows the authors' code for ImageNet, including the
convolution's initialization. SimKD's repository has the connector on the pooled vector instead: `student_taps: [pooled]`.

Shapes: B batch, C channels, H W positions, D features of the teacher, K classes.
"""

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from trainables.config import MethodOptions, NonNegative
from trainables.errors import ExperimentError
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements, mean_per_sample
from trainables.methods.features import connector
from trainables.models.tap_names import classifier


class SRRLOptions(MethodOptions):
    """Both parts with weight 1, like the task, as for ImageNet. SimKD's repository adds kd with weight 1."""

    feature_weight: NonNegative = Field(1.0, description="weight of L_FM, the difference of the features")
    regression_weight: NonNegative = Field(1.0, description="weight of L_SR, the difference of the classifier's outputs")
    student_taps: tuple[str, ...] = ("stage-1",)
    teacher_taps: tuple[str, ...] = ("pooled",)


class SRRL(Method):
    """mean (h_t − h_s)² + mean (z_t − W·h_s − b)², with h_s from a connector, W and b the teacher's."""

    requires = Requirements(student_logits=False, teacher_model=True, whole_batch=True)
    Options = SRRLOptions
    options: SRRLOptions
    terms = ("feature", "regression")

    def __init__(self, options: SRRLOptions, context: BuildContext) -> None:
        """Raises ExperimentError or ModelError: the teacher has no linear classifier on the tapped features."""
        super().__init__(options, context)
        assert context.teacher is not None
        self._classifier = (classifier(context.teacher.model),)  # in a tuple, so that it is not a submodule
        width = self._classifier[0].in_features
        student, teacher = context.student.shapes, context.teacher.shapes
        if teacher != ((width,),):
            raise ExperimentError(
                f"distill.options.srrl.teacher_taps: srrl reads the teacher's classifier input, ({width},), not {teacher}: "
                "leave out teacher_taps"
            )
        if len(student) != 1 or len(student[0]) not in (1, 3):
            raise ExperimentError(
                f"distill.options.srrl.student_taps: srrl reads one map (C, H, W) or vector (D,), not {student}: "
                "name one stage, or pooled"
            )
        self._connector = connector(student[0][0], width, context.group).append(nn.ReLU())

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `feature` (L_FM) and `regression` (L_SR) of each sample, (B,), multiplied by their weights."""
        (map_BCHW,), (target_BD,) = student.features, teacher.features
        if map_BCHW.ndim == 2:
            map_BCHW = map_BCHW[..., None, None]
        feature_BD = self._connector(map_BCHW).mean((2, 3))
        linear = self._classifier[0]
        weight_KD, bias_K = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        logits_BK = functional.linear(feature_BD, weight_KD, bias_K)
        return {
            "feature": self.options.feature_weight * mean_per_sample((feature_BD - target_BD).square()),
            "regression": self.options.regression_weight * mean_per_sample((logits_BK - teacher.logits_BK).square()),
        }
