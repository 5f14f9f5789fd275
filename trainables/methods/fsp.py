"""Flow of solution procedure: Yim, Joo, Bae and Kim 2017 (CVPR), "A Gift from Knowledge Distillation", equations 1 and 2.

The flow of a network from one map to a later one is the product of their channels, averaged over positions:

    G[i, j] = Σ over positions of F1[i]·F2[j] / (h·w)

In the init stage only the squared distance of the student's matrices from the teacher's trains the student, and afterwards only
the labels' loss. The larger of two maps is pooled to the smaller's size: by max pooling in the paper, by average pooling in
RepDistiller and mdistiller. The paper sums the squares, the codes average them.

Shapes: B batch, C channels (I of the earlier map, J of the later), H W positions, P = H·W.
"""

from itertools import pairwise
from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from trainables.config import Count, InitStageOptions
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import body_parameters, equal_channels, paired_maps, pooled_alike


class FSPOptions(InitStageOptions):
    """RepDistiller's defaults for CIFAR-100: 30 epochs, from the stem and each stage to the next."""

    init_epochs: Count = Field(30, description="epochs before training in which only this loss changes the student")
    variant: Literal["repdistiller", "paper"] = Field(
        "repdistiller", description="repdistiller: average pooling, mean of squares; paper: maximum pooling, sum of squares"
    )


class FSP(Method):
    """Before training: Σ over consecutive maps of ‖G_t − G_s‖², G = F1·F2ᵀ/(h·w); in it: nothing."""

    Options = FSPOptions
    options: FSPOptions
    terms = ()
    init_terms = ("flow",)
    taps = ("stem", "stages")
    requires = Requirements(logits=False)

    def __init__(self, options: FSPOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        equal_channels("fsp", paired_maps("fsp", context, at_least=2))

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `flow` of each sample, (B,)."""
        total_B = student.features[0].new_zeros(len(batch.labels_B))
        paper = self.options.variant == "paper"
        for student_pair, teacher_pair in zip(pairwise(student.features), pairwise(teacher.features), strict=True):
            squares_BIJ = (flow(*student_pair, maximum=paper) - flow(*teacher_pair, maximum=paper)).square()
            total_B = total_B + (squares_BIJ.sum((1, 2)) if paper else squares_BIJ.mean((1, 2)))
        return {"flow": total_B}

    def init_stage_parameters(self, student: nn.Module) -> list[nn.Parameter]:
        return body_parameters(student)


def flow(earlier_BCHW: Tensor, later_BCHW: Tensor, *, maximum: bool = False) -> Tensor:
    """Compute the matrix G of two maps of one model, (B, I, J). `maximum` uses max instead of average pooling."""
    if maximum:
        size = (min(earlier_BCHW.shape[2], later_BCHW.shape[2]), min(earlier_BCHW.shape[3], later_BCHW.shape[3]))
        earlier_BCHW, later_BCHW = (functional.adaptive_max_pool2d(map_BCHW, size) for map_BCHW in (earlier_BCHW, later_BCHW))
    else:
        earlier_BCHW, later_BCHW = pooled_alike(earlier_BCHW, later_BCHW)
    earlier_BIP, later_BJP = earlier_BCHW.flatten(2), later_BCHW.flatten(2)
    return earlier_BIP @ later_BJP.mT / earlier_BIP.shape[2]
