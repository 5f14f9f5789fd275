"""Instance relationship graph, IRG: Liu, Cao, Li, Yuan, Hu, Li and Duan 2019 (CVPR), equations 5 to 9.

A batch is a graph: samples are vertices, their distances are edges. From layer to layer the graph is transformed. Three losses
compare student and teacher:

- vertex: the mean squared difference of the logits;
- edge: of A, all pairs' squared distances divided by the largest of the batch, the mean over three features;
- transformation: of Λ, each sample's squared distance between an earlier and a later map, divided by the largest of the batch.

The authors' code is for Caffe: it compares pooled features, has a transformation inside a stage, and takes the largest distance
for a constant. The PyTorch code of Knowledge-Distillation-Zoo is followed: edges of two maps and the pooled features, gradients
through the largest, squared distances of at least 1e-12. The earlier map is average-pooled to the later one's size, and a later
map with twice the channels has pairs of them averaged. Distances that are all 0 are left so.

Shapes: B samples of this rank, N of the global batch, C channels, H W positions, D features.
"""

import torch
from pydantic import Field
from torch import Tensor

from trainables.config import MethodOptions, NonNegative
from trainables.errors import ExperimentError
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements, mean_per_sample
from trainables.methods.features import average_pooled
from trainables.methods.relations import squared_distances_of_pairs


class IRGOptions(MethodOptions):
    """The weights of Knowledge-Distillation-Zoo."""

    vertex: NonNegative = Field(0.1, description="weight of the logits")
    edge: NonNegative = Field(5.0, description="weight of the distances between samples")
    transformation: NonNegative = Field(5.0, description="weight of the distances between two maps of a sample")


class IRG(Method):
    """0.1·(difference of logits)² + 5·(difference of pairs' distances)² + 5·(difference of distances from map to map)²."""

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
        """`vertex` of each sample, (B,); `edge` and `transformation`, scalars; with their weights in them."""
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
    """Squared distance of each sample's two maps, (B,), at a common shape as described above."""
    later_BCHW = later_BCHW if later_BCHW.shape[1] == earlier_BCHW.shape[1] else (later_BCHW[:, ::2] + later_BCHW[:, 1::2]) / 2
    return (average_pooled(earlier_BCHW, *later_BCHW.shape[2:]) - later_BCHW).square().flatten(1).sum(1)


def distances(rows_ND: Tensor) -> Tensor:
    """Squared distances of all pairs divided by the largest, (N, N); 0 on the diagonal."""
    return _by_largest(squared_distances_of_pairs(rows_ND))


def _by_largest(values: Tensor) -> Tensor:
    return values / values.amax().clamp(min=1e-12) if values.numel() else values


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(values.numel(), 1)


def _check(context: BuildContext) -> None:
    assert context.teacher is not None
    for model, shapes in (("student", context.student.shapes), ("teacher", context.teacher.shapes)):
        option = f"distill.options.irg.{model}_taps"
        if len(shapes) < 2 or len(shapes[0]) != 3 or len(shapes[1]) != 3:
            raise ExperimentError(
                f"{option}: the first two have to be maps (C, H, W), an earlier and a later one: name two stages"
            )
        (channels, *size), (later, *later_size) = shapes[:2]
        if later not in (channels, 2 * channels) or any(a < b for a, b in zip(size, later_size, strict=True)):
            raise ExperimentError(
                f"{option}: the second map, {shapes[1]}, needs as many channels as the first, {shapes[0]}, or twice as many, and"
                " no larger a size: name other stages"
            )
    if len(context.student.shapes) != len(context.teacher.shapes):
        raise ExperimentError("distill.options.irg: student_taps and teacher_taps are compared one by one: name equally many")
