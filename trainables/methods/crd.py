"""Contrastive representation distillation, CRD: Tian, Krishnan and Isola 2020 (ICLR), equations 10 to 19.

A trained linear layer for each model embeds its features as v = unit(W·f + b) with E = 128 values. Two memory banks, the
student's and the teacher's, have one embedding of every training sample. A sample's v is compared with entries of the other
model's memory: its own, and K negatives of other classes. With P = exp(v·entry/τ)/Z and c = K/M,

    L_i = −log(P_own/(P_own + c + ε)) − Σ_k log(c/(P_k + c + ε)),  ε = 1e-7,

for the student's v and for the teacher's. Z is M times the mean of exp(v·entry/τ) over the first batch and then stays fixed.
Entries start uniform in ±√(3/E); after a batch is scored, its entries become unit(½·entry + ½·v). This follows RepDistiller and
mdistiller in their mode `exact`, which draws negatives without replacement.

Deviation: a sample's negatives are a function of (seed, epoch, sample), so that they do not depend on the number of workers or on
resuming. The samples of other classes, rotated to a random start, are cut into K equal parts, and one is drawn from each: each
sample is as likely as in a draw without replacement. If a batch repeats an index, the last one counts.

Shapes: B samples of this rank, N of the global batch, M training samples, E embedded features, K negatives, X = 1 + K.
"""

import math

import torch
from pydantic import Field
from torch import Tensor, nn

from trainables.config import Count, MethodOptions, NonNegative, Positive, Probability
from trainables.device.random_numbers import Draws
from trainables.errors import ExperimentError
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import check_one_tap, unit
from trainables.methods.relations import with_gradient

_EPSILON = 1e-7


class CRDOptions(MethodOptions):
    """The paper's defaults for CIFAR-100, which are RepDistiller's."""

    weight: NonNegative = 0.8
    negatives: Count = Field(16384, description="K, entries of other classes that a sample is compared with")
    temperature: Positive = Field(0.07, description="τ, by which inner products are divided")
    momentum: Probability = Field(0.5, description="share of an entry that stays when its sample is trained on")
    embedding: Count = Field(128, description="E, features of an entry")


class CRD(Method):
    """−log h(own entry) − Σ_k log(1 − h(entry k of another class)), h = P/(P + K/M), for student and teacher in turn."""

    Options = CRDOptions
    options: CRDOptions
    terms = ("student", "teacher")
    taps = ("pooled",)
    requires = Requirements(logits=False, hard_labels=True, whole_batch=True, same_images=True)
    memory_student: Tensor
    memory_teacher: Tensor
    normalizers_2: Tensor
    _order_M: Tensor
    _starts_C: Tensor
    _counts_C: Tensor

    def __init__(self, options: CRDOptions, context: BuildContext) -> None:
        """Create the memories, (M, E) each, which are saved in the checkpoint and lie on the device.

        Raises ExperimentError: several taps are named, or there is only one class, so that no sample has a negative.
        """
        super().__init__(options, context)
        self._seed = context.seed
        check_one_tap("crd", context)
        assert context.teacher is not None
        counts_C = torch.bincount(context.labels_M, minlength=context.num_classes)
        if int((counts_C > 0).sum()) < 2:
            raise ExperimentError("distill.method: crd compares samples of different classes, and the training data has only one")
        sizes = (math.prod(model.shapes[0]) for model in (context.student, context.teacher))
        self.embed_student, self.embed_teacher = (nn.Linear(size, options.embedding) for size in sizes)
        bound = math.sqrt(3 / options.embedding)
        for name in ("memory_student", "memory_teacher"):
            self.register_buffer(name, torch.empty(len(context.labels_M), options.embedding).uniform_(-bound, bound))
        self.register_buffer("normalizers_2", torch.zeros(2))  # 0: not set yet
        self.register_buffer("_order_M", context.labels_M.argsort(stable=True), persistent=False)
        self.register_buffer("_starts_C", counts_C.cumsum(0) - counts_C, persistent=False)
        self.register_buffer("_counts_C", counts_C, persistent=False)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return the losses of each sample, (B,): `student` against the teacher's memory, and `teacher` against the student's."""
        embedded = [
            unit(embed(outputs.features[0].flatten(1)))
            for embed, outputs in ((self.embed_student, student), (self.embed_teacher, teacher))
        ]
        memories = self.memory_teacher, self.memory_student
        entries_BX = self.entries(batch.indices_B, batch.labels_B, math.floor(batch.epoch))
        with torch.no_grad():
            pairs = zip(embedded, memories, strict=True)
            exponentials = [self._exponentials(v_BE, memory_ME, entries_BX) for v_BE, memory_ME in pairs]
            sums_B2 = torch.stack([exponentials_BX.sum(1) for exponentials_BX in exponentials], dim=1)
            all_NF = batch.all_gather(torch.cat([*embedded, sums_B2], dim=1).detach())
            indices_N = batch.all_gather(batch.indices_B)
            normalizers_2 = self._normalizers(all_NF[:, -2:])
            contrasts = [
                self._contrast(exponentials_BX / z, memory_ME, entries_BX)
                for exponentials_BX, z, memory_ME in zip(exponentials, normalizers_2, memories, strict=True)
            ]
            if self.training and len(indices_N):
                self.normalizers_2.copy_(normalizers_2)
                student_NE, teacher_NE = all_NF[:, :-2].chunk(2, 1)
                self._update(self.memory_student, student_NE, indices_N)
                self._update(self.memory_teacher, teacher_NE, indices_N)
        return {
            name: with_gradient(*contrast, v_BE) for name, contrast, v_BE in zip(self.terms, contrasts, embedded, strict=True)
        }

    def entries(self, indices_B: Tensor, labels_B: Tensor, epoch: int) -> Tensor:
        """Return the entries to compare each sample with, (B, 1 + K): its own, then K of other classes than its label.

        There are no repeats if other classes have at least K samples; otherwise the counts of repeats differ by at most one.
        """
        negatives = self.options.negatives
        random_BX = Draws(self._seed, epoch, indices_B).uniforms("crd", negatives + 1)
        counts_B1 = self._counts_C[labels_B][:, None]
        others_B1 = len(self._order_M) - counts_B1
        edges_BX = torch.arange(negatives + 1, device=indices_B.device) * others_B1 // negatives
        starts_BK, sizes_BK = edges_BX[:, :-1], edges_BX.diff(dim=1)
        turns_B1 = (random_BX[:, :1] * others_B1).long()
        positions_BK = (starts_BK + (random_BX[:, 1:] * sizes_BK).long() + turns_B1) % others_B1
        positions_BK = positions_BK + counts_B1 * (
            positions_BK >= self._starts_C[labels_B][:, None]
        )  # skips the sample's own class
        return torch.cat([indices_B[:, None], self._order_M[positions_BK]], dim=1)

    def _exponentials(self, v_BE: Tensor, memory_ME: Tensor, entries_BX: Tensor) -> Tensor:
        """Compute exp(v·entry/τ), (B, X), from all M products, which is cheaper than copying the entries for each sample."""
        return ((v_BE @ memory_ME.T).gather(1, entries_BX) / self.options.temperature).exp()

    def _normalizers(self, sums_N2: Tensor) -> Tensor:
        """Return Z of student and teacher, (2,), computed from the first batch, which may be this one."""
        first_2 = sums_N2.sum(0) * (len(self._order_M) / max(len(sums_N2) * (self.options.negatives + 1), 1))
        return torch.where(self.normalizers_2 > 0, self.normalizers_2, first_2)

    def _contrast(self, p_BX: Tensor, memory_ME: Tensor, entries_BX: Tensor) -> tuple[Tensor, Tensor]:
        """Compute L of each sample and its gradient with respect to v here, as the memory has changed when backward runs."""
        c = self.options.negatives / len(memory_ME)
        h_BX = p_BX / (p_BX + c + _EPSILON)
        loss_B = ((p_BX[:, 1:] + _EPSILON) / c).log1p().sum(1) - h_BX[:, 0].log()
        slopes_BX = torch.cat([h_BX[:, :1] - 1, h_BX[:, 1:]], dim=1) / self.options.temperature
        slopes_BM = torch.zeros(len(p_BX), len(memory_ME), dtype=h_BX.dtype, device=h_BX.device)
        return loss_B, slopes_BM.scatter_add_(1, entries_BX, slopes_BX) @ memory_ME

    def _update(self, memory_ME: Tensor, v_NE: Tensor, indices_N: Tensor) -> None:
        positions_N = torch.arange(len(indices_N), device=indices_N.device)
        last_M = indices_N.new_zeros(len(memory_ME)).scatter_reduce_(0, indices_N, positions_N, "amax")
        momentum = self.options.momentum
        memory_ME[indices_N] = unit(momentum * memory_ME[indices_N] + (1 - momentum) * v_NE[last_M[indices_N]])
