"""FitNets: Romero, Ballas, Kahou, Chassang, Gatta and Bengio 2015 (ICLR), "FitNets: Hints for Thin Deep Nets", equation 3.

A regressor r maps the student's guided layer to the shape of the teacher's hint layer. The loss is their squared distance,
averaged over a map's values, where the paper has half the sum. The paper first trains the student up to that layer with this loss
and then distills logits; here, as in RepDistiller and mdistiller, it is added to the labels' loss from the start.

Shapes: B batch, C channels, H W positions.
"""

from torch import Tensor, nn

from trainables.config import MethodOptions, NonNegative
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements, mean_per_sample
from trainables.methods.features import ConvReg, paired_maps


class FitNetOptions(MethodOptions):
    """RepDistiller's and mdistiller's defaults for CIFAR-100: weight 100, the second stage."""

    weight: NonNegative = 100.0


class FitNet(Method):
    """mean(F_t − r(F_s))², summed over pairs of taps."""

    Options = FitNetOptions
    terms = ("hint",)
    taps = ("stage2",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: FitNetOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.regressors = nn.ModuleList([ConvReg(*pair, context.group) for pair in paired_maps("fitnet", context)])

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `hint` of each sample, (B,)."""
        total_B = student.features[0].new_zeros(len(batch.labels_B))
        for regressor, s_BCHW, t_BCHW in zip(self.regressors, student.features, teacher.features, strict=True):
            total_B = total_B + mean_per_sample((t_BCHW - regressor(s_BCHW)).square())
        return {"hint": total_B}
