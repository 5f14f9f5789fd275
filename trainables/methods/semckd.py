"""Cross-Layer Distillation with Semantic Calibration: Chen, Mei, Zhang, Wang, Wang, Feng and Chen 2021 (AAAI), section 3.3.

Every layer l of the student learns from every layer m of the teacher, each sample with its own weights (equations 4 to 9):

    L = (1 / N·n_s) Σ over samples i, l, m of α[i, l, m]·mean over C, H and W of (r_lm(s_l) − t_m)²
    α[i, l, ·] = softmax over m of (q_l[i]·k_m[i] / temperature)

q_l and k_m are computed from the similarities of a sample with its batch, A = F·Fᵀ with F the flattened maps: a row of A passes
W₂·relu(W₁·A + b₁) + b₂ and is divided by its norm. W₁ has as many columns as a batch has samples. r_lm is 1×1 convolution, batch
norm, ReLU, 3×3, batch norm, ReLU, 1×1; the larger of two maps is first averaged to the smaller one's size.

Deviations from the authors' code: the batch is the global one, on any number of workers; for a shorter last batch the rows of A
are zero-padded (the code drops it); a zero vector is not divided by its norm.

Shapes: B batch of this rank, N global batch, G maximum of N, S and T layers of student and teacher, C channels, H W positions,
D features, E features of a query or key.
"""

from collections.abc import Iterable, Sequence

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from trainables.config import MethodOptions, NonNegative, Positive
from trainables.distributed.batch_norm import GlobalBatchNorm2d
from trainables.distributed.group import Group
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements, mean_per_sample
from trainables.methods.features import check_maps, pooled_alike, unit


class SemCKDOptions(MethodOptions):
    """The authors' values for CIFAR-100, where they add kd with weight 1 (`method: [kd, semckd]`)."""

    weight: NonNegative = 400.0
    temperature: Positive = Field(1.0, description="divisor of the products of queries and keys")


class SemCKD(Method):
    """Mean over samples and student layers of Σ over teacher layers of α·mean (r(student) − teacher)²."""

    Options = SemCKDOptions
    options: SemCKDOptions
    terms = ("calibrated",)
    taps = ("stages",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: SemCKDOptions, context: BuildContext) -> None:
        """Raises ExperimentError: a tap is not a map."""
        super().__init__(options, context)
        self._rows = context.global_batch_size
        assert context.teacher is not None
        check_maps("semckd", context)
        students, teachers = context.student.shapes, context.teacher.shapes
        self._queries = nn.ModuleList(_embedding(self._rows) for _ in students)
        self._keys = nn.ModuleList(_embedding(self._rows) for _ in teachers)
        self._regressors = nn.ModuleList(
            nn.ModuleList(_regressor(student[0], teacher[0], context.group) for teacher in teachers) for student in students
        )

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `calibrated`, a scalar."""
        flat_ND = batch.all_gather_many(*(map_BCHW.flatten(1) for map_BCHW in (*student.features, *teacher.features)))
        queries_NSE = self._embedded(self._queries, flat_ND[: len(self._queries)])
        keys_NTE = self._embedded(self._keys, flat_ND[len(self._queries) :])
        attention_NST = torch.softmax(queries_NSE @ keys_NTE.transpose(1, 2) / self.options.temperature, 2)
        distances_NST = batch.all_gather(self._distances(student.features, teacher.features))
        shares_NS = (attention_NST * distances_NST).sum(2)
        return {"calibrated": shares_NS.sum() / max(shares_NS.numel(), 1)}

    def _embedded(self, embeddings: Iterable[nn.Module], layers: Sequence[Tensor]) -> Tensor:
        """Return a query or key for each layer from the similarities of its samples' rows (N, D)."""
        embedded = []
        for embedding, flat_ND in zip(embeddings, layers, strict=True):
            similar_NN = flat_ND @ flat_ND.T
            similar_NG = functional.pad(similar_NN, (0, self._rows - len(similar_NN)))
            embedded.append(unit(embedding(similar_NG)))
        return torch.stack(embedded, 1)

    def _distances(self, students: Sequence[Tensor], teachers: Sequence[Tensor]) -> Tensor:
        """Compute the mean squared differences of all pairs of layers, (B, S, T)."""
        rows = []
        for regressors, student_BCHW in zip(self._regressors, students, strict=True):
            row = []
            for regressor, teacher_BCHW in zip(regressors, teachers, strict=True):  # type: ignore[call-overload]
                source_BCHW, target_BCHW = pooled_alike(student_BCHW, teacher_BCHW)
                row.append(mean_per_sample((regressor(source_BCHW) - target_BCHW).square()))
            rows.append(torch.stack(row, 1))
        return torch.stack(rows, 1)


def _embedding(inputs: int) -> nn.Sequential:
    width = max(inputs // 4, 1)
    return nn.Sequential(nn.Linear(inputs, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


def _regressor(inputs: int, outputs: int, group: Group) -> nn.Sequential:
    width = 2 * outputs
    return nn.Sequential(
        nn.Conv2d(inputs, width, 1, bias=False),
        GlobalBatchNorm2d(width, group),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        GlobalBatchNorm2d(width, group),
        nn.ReLU(),
        nn.Conv2d(width, outputs, 1, bias=False),
    )
