"""Instance relationship graph, IRG: Liu, Cao, Li, Yuan, Hu, Li and Duan 2019 (CVPR), equations 5 to 9.

A batch is a graph whose vertices are samples and whose edges are their distances; each layer transforms it. Three losses are mean
squared differences between student and teacher:

- vertex: of the logits;
- edge: of A, all pairs' squared distances divided by the largest of the batch, averaged over three features;
- transformation: of Λ, each sample's squared distance between an earlier and a later map, divided by the largest of the batch.

The authors' Caffe code compares pooled features, has a transformation inside a stage, and treats the largest distance as a
constant. This follows the PyTorch code of Knowledge-Distillation-Zoo: edges of two maps and the pooled features, gradients
through the largest distance, and squared distances of at least 1e-12. The earlier map is average-pooled to the later one's size,
and if the later one has twice the channels, pairs of them are averaged. Distances that are all 0 stay 0.

Shapes: B samples of this rank, N of the global batch, C channels, H W positions, D features.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from trainables.config import MethodOptions, NonNegative
from trainables.errors import ExperimentError
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements, mean_per_sample
from trainables.methods.features import Shape, average_pooled, check_taps
from trainables.methods.relations import squared_distances_of_pairs


class IRGOptions(MethodOptions):
    """The weights of Knowledge-Distillation-Zoo."""

    vertex: NonNegative = Field(0.1, description="weight of the logits")
    edge: NonNegative = Field(5.0, description="weight of the distances between samples")
    transformation: NonNegative = Field(5.0, description="weight of the distances between two maps of a sample")


class IRG(Method):
    """0.1·(difference of logits)² + 5·(difference of pairs' distances)² + 5·(difference of distances between maps)²."""

    Options = IRGOptions
    options: IRGOptions
    terms = ("vertex", "edge", "transformation")
    taps = ("stage2", "stage3", "pooled")
    """An earlier map, a later one, and any features."""
    requires = Requirements(whole_batch=True)

    def __init__(self, options: IRGOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        _check(context)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `vertex` of each sample, (B,), and the scalars `edge` and `transformation`, multiplied by their weights."""
        parts = [
            part.flatten(1)
            for outputs in (student, teacher)
            for part in (*outputs.features, change(*outputs.features[:2])[:, None])
        ]
        rows = batch.all_gather_many(*parts)
        edges, changes = [], []
        for *features, change_N1 in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            changes.append(_by_largest(change_N1[:, 0].clamp(min=1e-12)))
            edges.append(torch.stack([distances(feature) for feature in features]))
        return {
            "vertex": self.options.vertex * mean_per_sample((student.logits_BK - teacher.logits_BK).square()),
            "edge": self.options.edge * _mean((edges[0] - edges[1]).square()),
            "transformation": self.options.transformation * _mean((changes[0] - changes[1]).square()),
        }


def change(earlier_BCHW: Tensor, later_BCHW: Tensor) -> Tensor:
    """Compute the squared distance of each sample's two maps, (B,), at a common shape as described above."""
    later_BCHW = later_BCHW if later_BCHW.shape[1] == earlier_BCHW.shape[1] else (later_BCHW[:, ::2] + later_BCHW[:, 1::2]) / 2
    return (average_pooled(earlier_BCHW, *later_BCHW.shape[2:]) - later_BCHW).square().flatten(1).sum(1)


def distances(rows_ND: Tensor) -> Tensor:
    """Compute squared distances of all pairs divided by the largest, (N, N), with 0 on the diagonal."""
    return _by_largest(squared_distances_of_pairs(rows_ND))


def _by_largest(values: Tensor) -> Tensor:
    return values / values.amax().clamp(min=1e-12) if values.numel() else values


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(values.numel(), 1)


def _check(context: BuildContext) -> None:
    assert context.teacher is not None
    reads = "an earlier and a later map (C, H, W), of as many or twice as many channels and not larger, and other features"
    check_taps("irg", context, _begin_with_two_maps, reads, "name two such stages first")
    if len(context.student.shapes) != len(context.teacher.shapes):
        raise ExperimentError("distill.options.irg: student_taps and teacher_taps are compared in pairs: name equally many")


def _begin_with_two_maps(shapes: Sequence[Shape]) -> bool:
    if [len(shape) for shape in shapes[:2]] != [3, 3]:
        return False
    (channels, *size), (later, *later_size) = shapes[:2]
    return later in (channels, 2 * channels) and all(a >= b for a, b in zip(size, later_size, strict=True))
