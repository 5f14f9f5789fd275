"""Losses that compare samples with each other: scalars over the whole global batch, but for CRD's shares.

Shapes: features (N, D), or (N, C, H, W) where they are flattened. A batch of one has no pairs: where published code then
divides 0 by 0 the value here is 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.trainables.methods.references import basic
from tests.trainables.methods.references.basic import Array, Ints, double, flat, unit


def sp(student: Array, teacher: Array) -> float:
    """‖G_t − G_s‖²/N², G the Gram matrix of flattened features with each ROW a unit vector. Tung & Mori, ICCV 2019, equations
    2 to 4. RepDistiller and mdistiller agree: weight 3000, the last stage's map."""
    matrices = []
    for features in (flat(double(student)), flat(double(teacher))):
        matrices.append(double([unit(row) for row in features @ features.T]))
    return float(((matrices[1] - matrices[0]) ** 2).sum() / len(student) ** 2)


def cc(student_ND: Array, teacher_ND: Array, gamma: float = 0.4, order: int = 2) -> float:
    """(1/N²)·Σ_ij (φ(s_i, s_j) − φ(t_i, t_j))². Peng et al., ICCV 2019, L_CC with the Gaussian kernel's Taylor expansion:
    φ(x, y) = exp(−2γ)·Σ_p (2γ)^p/p!·(x·y)^p for p = 0 … P, x and y unit vectors; γ = 0.4, P = 2."""

    def correlations(features: Array) -> Array:
        rows = [unit(row) for row in double(features)]
        out = np.zeros((len(rows), len(rows)))
        for i, x in enumerate(rows):
            for j, y in enumerate(rows):
                series = sum((2 * gamma) ** p / math.factorial(p) * float(x @ y) ** p for p in range(order + 1))
                out[i, j] = math.exp(-2 * gamma) * series
        return out

    return float(((correlations(student_ND) - correlations(teacher_ND)) ** 2).mean())


def cc_repdistiller(
    student_ND: Array, teacher_ND: Array, student_embed: tuple[Array, Array], teacher_embed: tuple[Array, Array]
) -> float:
    """RepDistiller's other loss of that name (weight 0.02): e = a linear layer (weight, bias) to 128 values on each side, both
    trained; δ_i = |e_s(i) − e_t(i)|; the mean over i of Σ_d δ_i·δ_{i+1}, samples in the batch's order."""
    s, t = basic.linear(double(student_ND), *student_embed), basic.linear(double(teacher_ND), *teacher_embed)
    gaps = np.abs(s - t)
    products = [float((gaps[i] * gaps[i + 1]).sum()) for i in range(len(gaps) - 1)]
    return float(np.mean(products)) if products else 0.0


def huber(x: float) -> float:
    """½x² below 1, else |x| − ½: Park et al., CVPR 2019, l_δ with δ = 1."""
    return 0.5 * x * x if abs(x) < 1 else abs(x) - 0.5


def _distances(features_ND: Array) -> Array:
    """Over the mean of the positive ones; an off-diagonal distance is at least 1e-6, the diagonal is 0."""
    x = flat(double(features_ND))
    out = np.zeros((len(x), len(x)))
    for i in range(len(x)):
        for j in range(len(x)):
            if i != j:
                out[i, j] = math.sqrt(max(float(((x[i] - x[j]) ** 2).sum()), 1e-12))
    positive = out[out > 0]
    return out / positive.mean() if len(positive) else out


def rkd_distance(student_ND: Array, teacher_ND: Array, variant: str = "repdistiller") -> float:
    """Huber of the normalized pairwise distances' difference. Park et al., CVPR 2019, L_RKD-D.

    variant `repdistiller` (mdistiller and the authors' code alike): the mean over all N² entries, the diagonal's zeros
    included; `paper`: over the N(N − 1) pairs of two samples.
    """
    s, t = _distances(student_ND), _distances(teacher_ND)
    count = len(s) ** 2 if variant == "repdistiller" else len(s) * (len(s) - 1)
    return sum(huber(float(a)) for a in (s - t).ravel()) / count if count else 0.0


def rkd_angle(student_ND: Array, teacher_ND: Array, variant: str = "repdistiller") -> float:
    """Huber of the difference of the cosines at sample i between the directions to j and k. Park et al., CVPR 2019, L_RKD-A.

    variant `repdistiller` (mdistiller and the authors' code alike): the mean over all N³ triples, those with equal members
    included; `paper`: over the N(N − 1)(N − 2) triples of three samples.
    """
    s, t = flat(double(student_ND)), flat(double(teacher_ND))
    samples, total = range(len(s)), 0.0
    for i in samples:
        to_s, to_t = [unit(s[j] - s[i]) for j in samples], [unit(t[j] - t[i]) for j in samples]
        for j in samples:
            for k in samples:
                if variant == "repdistiller" or len({i, j, k}) == 3:
                    total += huber(float(to_s[j] @ to_s[k] - to_t[j] @ to_t[k]))
    count = len(s) ** 3 if variant == "repdistiller" else len(s) * (len(s) - 1) * (len(s) - 2)
    return total / count if count else 0.0


def rkd(student_ND: Array, teacher_ND: Array, variant: str = "repdistiller") -> float:
    """25·`rkd_distance` + 50·`rkd_angle`: Park et al., CVPR 2019; RepDistiller's and mdistiller's weights, pooled features."""
    return 25 * rkd_distance(student_ND, teacher_ND, variant) + 50 * rkd_angle(student_ND, teacher_ND, variant)


def pkt(student_ND: Array, teacher_ND: Array, variant: str = "repdistiller") -> float:
    """KL of the rows of pairwise similarities ½(cos + 1), each row over its sum. Passalis & Tefas, ECCV 2018.

    variant `repdistiller` (mdistiller and the authors' code alike; weight 30000): a length gets 1e-7 added, the diagonal
    counts, the logarithm is of (p_t + 1e-7)/(p_s + 1e-7), and the mean is over all N² entries. `paper`: only pairs of two
    samples, summed.
    """
    official = variant == "repdistiller"

    def rows(features: Array) -> Array:
        x = [row / (math.sqrt(row @ row) + 1e-7) if official else unit(row) for row in flat(double(features))]
        out = np.zeros((len(x), len(x)))
        for i in range(len(x)):
            for j in range(len(x)):
                out[i, j] = (float(x[i] @ x[j]) + 1) / 2 if official or i != j else 0.0
        return double([row / row.sum() if row.sum() > 0 else row for row in out])

    s, t = rows(student_ND), rows(teacher_ND)
    if official:
        return float(np.mean(t * np.log((t + 1e-7) / (s + 1e-7))))
    return float(sum(a * math.log(a / b) for a, b in zip(t.ravel(), s.ravel(), strict=True) if a > 0))


def irg_edges(features: Array) -> Array:
    """(N, N): squared distances of flattened features over the largest of them. Liu et al., CVPR 2019, the IRG's edges.
    An off-diagonal square is at least 1e-12, and so is what they are divided by."""
    x = flat(double(features))
    out = np.zeros((len(x), len(x)))
    for i in range(len(x)):
        for j in range(len(x)):
            if i != j:
                out[i, j] = max(float(((x[i] - x[j]) ** 2).sum()), 1e-12)
    return out / max(out.max(), 1e-12)


def irg_transformation(lower_NCHW: Array, upper_NCHW: Array) -> Array:
    """(N,): each sample's squared distance between two layers' maps over the largest of them. Liu et al., CVPR 2019, the IRG
    transformation. The lower map is average-pooled to the upper one's size; if the upper one has twice the channels, channels
    2c and 2c + 1 are averaged (Knowledge-Distillation-Zoo; the authors stay within a stage)."""
    lower, upper = double(lower_NCHW), double(upper_NCHW)
    if lower.shape[2:] != upper.shape[2:]:
        lower = basic.adaptive_avg_pool2d(lower, *upper.shape[2:])
    if lower.shape[1] < upper.shape[1]:
        upper = (upper[:, 0::2] + upper[:, 1::2]) / 2
    squares = double([max(float(((a - b) ** 2).sum()), 1e-12) for a, b in zip(lower, upper, strict=True)])
    return squares / squares.max()


def irg(
    student_logits_NK: Array,
    teacher_logits_NK: Array,
    student_features: Sequence[Array],
    teacher_features: Sequence[Array],
    student_maps: tuple[Array, Array],
    teacher_maps: tuple[Array, Array],
) -> tuple[float, float, float]:
    """(vertices, edges, transformation), without weights: Liu et al., CVPR 2019, L_IRG's two parts and L_IRG-t, as
    Knowledge-Distillation-Zoo reduces them (its weights: 0.1, 5, 5).

    vertices: the mean square of the logits' difference. edges: the mean over the given features (pooled, the last map, the one
    before) of the mean square over N² of the difference of `irg_edges`. transformation: the mean square over samples of the
    difference of `irg_transformation` of the given two maps. The authors' Caffe layers have ½, a weight of 0.005, and a
    backward pass that takes the largest distance for a constant and half of the edges' gradient.
    """
    vertices = float(((double(student_logits_NK) - double(teacher_logits_NK)) ** 2).mean())
    pairs = list(zip(student_features, teacher_features, strict=True))
    edges = sum(float(((irg_edges(s) - irg_edges(t)) ** 2).mean()) for s, t in pairs) / len(pairs)
    gap = irg_transformation(*student_maps) - irg_transformation(*teacher_maps)
    return vertices, edges, float((gap**2).mean())


@dataclass(frozen=True)
class CrdMemory:
    """CRD's state: (samples of the split, dim) for each side, and the two constants Z, None before the first batch."""

    student_ND: Array
    teacher_ND: Array
    student_z: float | None = None
    teacher_z: float | None = None


def crd_embed(features_BD: Array, weight: Array, bias: Array) -> Array:
    """A linear layer to 128 values, then a unit vector: Tian et al., ICLR 2020, g_S and g_T."""
    return double([unit(row) for row in basic.linear(double(features_BD), weight, bias)])


def crd(
    student_BE: Array, teacher_BE: Array, contrast_BK: Ints, memory: CrdMemory, temperature: float = 0.07, momentum: float = 0.5
) -> tuple[Array, CrdMemory]:
    """(each sample's share of a mean, the memory after this batch). Tian, Krishnan & Isola, ICLR 2020, as RepDistiller has it.

    student_BE and teacher_BE are embedded (`crd_embed`); contrast_BK holds a sample's own index in the split first, then its
    negatives. P = exp(v·memory/τ)/Z, the student against the teacher's memory and the teacher against the student's. The loss
    of one row is −log(P₀/(P₀ + m + ε)) − Σ_k log(m/(P_k + m + ε)) with m = (number of negatives)/(samples of the split) and
    ε = 1e-7; both directions add up. Z is, once and for all, the first batch's mean of exp(v·memory/τ) times the samples of
    the split, one for each direction. Then memory[own] ← unit(0.5·memory[own] + 0.5·v). Weight 0.8.
    """
    samples, negatives = len(memory.student_ND), contrast_BK.shape[1] - 1
    noise = negatives / samples

    def scores(anchors: Array, bank: Array) -> Array:
        rows = zip(anchors, contrast_BK, strict=True)
        return double([[math.exp(float(v @ bank[at]) / temperature) for at in row] for v, row in rows])

    of_student, of_teacher = scores(student_BE, memory.teacher_ND), scores(teacher_BE, memory.student_ND)
    student_z = float(of_student.mean()) * samples if memory.student_z is None else memory.student_z
    teacher_z = float(of_teacher.mean()) * samples if memory.teacher_z is None else memory.teacher_z
    losses = np.zeros(len(student_BE))
    for p in (of_student / student_z, of_teacher / teacher_z):
        for b, row in enumerate(p):
            losses[b] -= math.log(row[0] / (row[0] + noise + 1e-7))
            losses[b] -= sum(math.log(noise / (value + noise + 1e-7)) for value in row[1:])
    banks = []
    for bank, values in ((memory.student_ND, student_BE), (memory.teacher_ND, teacher_BE)):
        after = bank.copy()
        for v, row in zip(values, contrast_BK, strict=True):
            after[row[0]] = unit(momentum * bank[row[0]] + (1 - momentum) * v)
        banks.append(after)
    return losses, CrdMemory(banks[0], banks[1], student_z, teacher_z)
