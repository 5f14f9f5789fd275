"""Losses of intermediate features. Shapes: maps (B, C, H, W) in lists, one element a stage; each loss is (B,), per sample.

Auxiliary parameters are explicit: `Norm` is a batch norm's (weight_C, bias_C), a convolution's weight is (out, in, kh, kw).
Features that have no auxiliary modules of the paper's and no other shapes are compared as they come.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tests.trainables.methods.references import basic
from tests.trainables.methods.references.basic import Array, batch_norm, conv2d, double, flat, leaky_relu, relu, same_size, unit

Norm = tuple[Array, Array]
Maps = Sequence[Array]


class Layer(NamedTuple):
    """A convolution and what follows it; `norm` None means none."""

    weight: Array
    bias: Array | None = None
    norm: Norm | None = None


def _per_sample(values_per_stage: Sequence[Array]) -> Array:
    return np.sum([double(v) for v in values_per_stage], axis=0)


def conv_regressor(student_BCHW: Array, teacher_size: tuple[int, int], layer: Layer, with_relu: bool = True) -> Array:
    """RepDistiller's ConvReg: the student's map with the teacher's channels and size.

    Twice the teacher's height: stride 2, padding 1 (kernel 3). Half: transposed, stride 2, padding 1 (kernel 4, weight
    (in, out, 4, 4)). The same height: any odd kernel, padded. Else larger: a valid convolution. Then batch norm, then ReLU.
    """
    height, wanted = student_BCHW.shape[2], teacher_size[0]
    if height == 2 * wanted:
        x = conv2d(student_BCHW, layer.weight, layer.bias, stride=2, padding=1)
    elif 2 * height == wanted:
        x = basic.conv_transpose2d(student_BCHW, layer.weight, layer.bias, stride=2, padding=1)
    elif height == wanted:
        x = conv2d(student_BCHW, layer.weight, layer.bias, padding=layer.weight.shape[2] // 2)
    else:
        x = conv2d(student_BCHW, layer.weight, layer.bias)
    assert x.shape[2:] == teacher_size
    x = x if layer.norm is None else batch_norm(x, *layer.norm)
    return relu(x) if with_relu else x


def fitnet(
    student_BCHW: Array, teacher_BCHW: Array, regressor: Layer, variant: str = "repdistiller", with_relu: bool = True
) -> Array:
    """(F_t − r(F_s))², per sample. Romero et al., ICLR 2015, equation 3.

    variant `paper`: half the SUM over C, H and W. `repdistiller` (and mdistiller): the MEAN over them; weight 100, the second
    stage's map after its ReLU, r = `conv_regressor`, trained with the task from the start (the paper: before it).
    """
    squares = flat((double(teacher_BCHW) - conv_regressor(student_BCHW, teacher_BCHW.shape[2:], regressor, with_relu)) ** 2)
    return squares.sum(axis=1) / 2 if variant == "paper" else squares.mean(axis=1)


def attention_map(x_CHW: Array, p: float = 2.0) -> Array:
    """Σ_c |F_c|^p as a unit vector of H·W: Zagoruyko & Komodakis, ICLR 2017, F_sum^p of section 3.1."""
    height, width = x_CHW.shape[1:]
    return unit(double([sum(abs(x_CHW[c, i, j]) ** p for c in range(len(x_CHW))) for i in range(height) for j in range(width)]))


def at(students: Maps, teachers: Maps, p: float = 2.0, variant: str = "repdistiller") -> Array:
    """The distance of unit attention maps, per sample, summed over stages. Zagoruyko & Komodakis, ICLR 2017, equation 2.

    variant `paper`: ½·‖Q_s − Q_t‖₂, not squared, without β. `repdistiller` (and mdistiller, and the authors' code): the mean
    over H·W of the squares; weight 1000, the stages' maps after ReLU, the larger map average-pooled. They take the mean over
    channels where the paper sums, which a unit vector does not show.
    """
    stages = []
    for student, teacher in zip(students, teachers, strict=True):
        pairs = zip(*same_size(double(student), double(teacher)), strict=True)
        gaps = [attention_map(s, p) - attention_map(t, p) for s, t in pairs]
        stages.append(double([np.sqrt((g * g).sum()) / 2 if variant == "paper" else (g * g).mean() for g in gaps]))
    return _per_sample(stages)


def ab(
    students: Maps, teachers: Maps, connectors: Sequence[Layer | None], margin: float = 1.0, variant: str = "repdistiller"
) -> Array:
    """The hinge on activation boundaries, per sample, summed over neurons and stages. Heo et al., AAAI 2019, the alternative
    loss: (s + m)² where the teacher is off and s > −m, (s − m)² where it is on and s ≤ m; maps BEFORE the ReLU.

    variant `paper`: the plain sum. `repdistiller`: stage i of n weighs 2^(i − n + 1), all times 3/1000; 30 epochs of it alone
    before the task, connectors are `conv_regressor` without ReLU, or None where shapes are equal. A connector that is None
    passes the map on.
    """
    stages = []
    for i, (student, teacher, connector) in enumerate(zip(students, teachers, connectors, strict=True)):
        s = double(student) if connector is None else conv_regressor(student, teacher.shape[2:], connector, with_relu=False)
        off = relu(s + margin) ** 2 * (teacher <= 0)
        on = relu(margin - s) ** 2 * (teacher > 0)
        weight = 1.0 if variant == "paper" else 2.0 ** (i - len(students) + 1) * 3 / 1000
        stages.append(weight * flat(off + on).sum(axis=1))
    return _per_sample(stages)


def ft_encode(x_BCHW: Array, layers: Sequence[Layer], slope: float = 0.1) -> Array:
    """Factor transfer's paraphraser (its first half) or translator: 3x3 convolutions with bias, padding 1, maybe batch norm,
    leaky ReLU of slope 0.1 after each. RepDistiller's translator has batch norms, the authors' has none."""
    for layer in layers:
        x_BCHW = conv2d(x_BCHW, layer.weight, layer.bias, padding=1)
        x_BCHW = x_BCHW if layer.norm is None else batch_norm(x_BCHW, *layer.norm)
        x_BCHW = leaky_relu(x_BCHW, slope)
    return x_BCHW


def ft_decode(factor_BCHW: Array, layers: Sequence[Layer], slope: float = 0.1) -> Array:
    """The paraphraser's second half: transposed 3x3 convolutions (weight (in, out, 3, 3)), stride 1, padding 1, leaky ReLU."""
    for layer in layers:
        factor_BCHW = leaky_relu(basic.conv_transpose2d(factor_BCHW, layer.weight, layer.bias, padding=1), slope)
    return factor_BCHW


def ft_reconstruction(teacher_BCHW: Array, encoder: Sequence[Layer], decoder: Sequence[Layer]) -> Array:
    """‖x − P(x)‖², the mean over C, H and W, per sample: what trains the paraphraser. Kim et al., NeurIPS 2018, L_rec
    (the mean as RepDistiller takes it; 30 epochs of it alone)."""
    return double(flat((teacher_BCHW - ft_decode(ft_encode(teacher_BCHW, encoder), decoder)) ** 2).mean(axis=1))


def ft(student_factor_BCHW: Array, teacher_factor_BCHW: Array, variant: str = "repdistiller") -> Array:
    """The L1 distance of unit factors, per sample. Kim, Park & Kwak, NeurIPS 2018, L_FT with p = 1.

    variant `paper`: the factor as a unit vector of C·H·W, the SUM of |differences|; `official`: their MEAN (weight 500);
    `repdistiller`: the factor is first collapsed to its attention map (mean over channels of squares), unit over H·W, the mean
    of |differences| over H·W (weight 200).
    """
    out = []
    for s, t in zip(*same_size(double(student_factor_BCHW), double(teacher_factor_BCHW)), strict=True):
        gap = np.abs(attention_map(s) - attention_map(t) if variant == "repdistiller" else unit(s) - unit(t))
        out.append(gap.sum() if variant == "paper" else gap.mean())
    return double(out)


def fsp_matrix(lower_BCHW: Array, upper_BCHW: Array) -> Array:
    """(B, C_lower, C_upper): G_ij = Σ_hw F¹_i·F²_j / (H·W). Yim et al., CVPR 2017, equation 1. The larger map is
    average-pooled as in RepDistiller (max-pooled in the paper)."""
    lower, upper = same_size(double(lower_BCHW), double(upper_BCHW))
    pixels = lower.shape[2] * lower.shape[3]
    out = np.zeros((len(lower), lower.shape[1], upper.shape[1]))
    for b, i, j in np.ndindex(*out.shape):
        out[b, i, j] = (lower[b, i] * upper[b, j]).sum() / pixels
    return out


def fsp(students: Maps, teachers: Maps, variant: str = "repdistiller") -> Array:
    """(G_t − G_s)² of each two consecutive maps, per sample, summed over pairs of maps. Yim et al., CVPR 2017, equation 2.

    variant `paper`: the SUM over the matrix' entries; `repdistiller`: their MEAN (weight 50, 30 epochs of it alone before the
    task). Channels of student and teacher are equal.
    """
    pairs = []
    for s, t in zip(pairwise(students), pairwise(teachers), strict=True):
        squares = flat((fsp_matrix(*t) - fsp_matrix(*s)) ** 2)
        pairs.append(squares.sum(axis=1) if variant == "paper" else squares.mean(axis=1))
    return _per_sample(pairs)


def nst(students: Maps, teachers: Maps, kernel: str = "poly", degree: int = 2, offset: float = 0.0) -> Array:
    """The squared MMD of the two sets of channels, per sample, summed over stages. Huang & Wang 2017, the equation of L_MMD².

    A channel is its H·W values as a unit vector. kernel `poly`: (x·y + c)^d with d = 2, c = 0 (RepDistiller, mdistiller:
    weight 50, no ½; the paper has λ/2); `linear`: x·y; `gaussian`: exp(−‖x − y‖²/2σ²), σ² the mean squared distance of a
    student's and a teacher's channel. Means over all pairs of channels; their numbers may differ.
    """
    stages = []
    for student, teacher in zip(students, teachers, strict=True):
        values = []
        for s_CHW, t_CHW in zip(*same_size(double(student), double(teacher)), strict=True):
            s, t = [unit(c) for c in s_CHW], [unit(c) for c in t_CHW]
            spread = np.mean([((x - y) ** 2).sum() for x in s for y in t])

            def alike(x: Array, y: Array, spread: float = spread) -> float:
                if kernel == "gaussian":
                    return math.exp(-((x - y) ** 2).sum() / (2 * spread))
                return float((x * y).sum()) if kernel == "linear" else float(((x * y).sum() + offset) ** degree)

            of_t = np.mean([alike(x, y) for x in t for y in t])
            of_s = np.mean([alike(x, y) for x in s for y in s])
            of_both = np.mean([alike(x, y) for x in s for y in t])
            values.append(of_t + of_s - 2 * of_both)
        stages.append(double(values))
    return _per_sample(stages)


def vid(
    students: Maps,
    teachers: Maps,
    regressors: Sequence[tuple[Array, Array, Array]],
    raw_variances: Sequence[Array],
    eps: float = 1e-5,
    variant: str = "repdistiller",
) -> Array:
    """(t − μ(s))²/(2σ_c²) + ½·log σ_c², per sample, summed over stages: the negative log of a Gaussian without its constant.
    Ahn et al., CVPR 2019, L_VID; σ_c² = log(1 + exp a_c) + ε, `raw_variances` the a of each stage's channels.

    variant `paper`: the SUM over C, H and W; `repdistiller`: the MEAN (weight 1). μ: three 1x1 convolutions without bias and a
    ReLU between; a starts at log(exp(5 − ε) − 1). mdistiller never trains a. The loss may be negative.
    """
    stages = []
    for student, teacher, weights, raw_C in zip(students, teachers, regressors, raw_variances, strict=True):
        s, t = same_size(double(student), double(teacher))
        mean = conv2d(relu(conv2d(relu(conv2d(s, weights[0])), weights[1])), weights[2])
        variance = (np.logaddexp(0.0, raw_C) + eps)[None, :, None, None]
        terms = flat(0.5 * ((t - mean) ** 2 / variance + np.log(variance)))
        stages.append(terms.sum(axis=1) if variant == "paper" else terms.mean(axis=1))
    return _per_sample(stages)


def _right_singular(x_CHW: Array) -> tuple[Array, Array]:
    """(singular values, their right vectors as rows of length C) of the matrix (H·W, C), largest first."""
    _, values, rows = np.linalg.svd(x_CHW.reshape(len(x_CHW), -1).T, full_matrices=False)
    return values, rows


def kdsvd(students: Maps, teachers: Maps, k: int = 1, variant: str = "repdistiller") -> Array:
    """The difference of radial basis functions between consecutive stages' singular vectors, per sample, summed over pairs.
    Lee, Kim & Song, ECCV 2018.

    Of each stage: the teacher's first k right singular vectors, and for each the vector of the student's first k + 3 with the
    largest |cosine|, turned to the teacher's side; both times the teacher's singular values as a unit vector of k. Between a
    stage a and the next b: exp(−(b_i − a_j)²/8) for all channels i, j and each of the k, and the squared differences summed.
    variant `paper` (the authors' code): that times ½·√k. mdistiller reshapes to (C·H, W), which is another matrix.

    Where a map of the teacher has fewer singular vectors than k, its number is k for all: in the authors' code n =
    min(n, those of the map), and the factor is √n.

    The sign of a singular vector is arbitrary and the loss depends on it, so the teacher's is turned until its component of
    largest size (the first of equals) is positive.
    """
    k = min(k, *(min(map_.shape[1], map_.shape[2] * map_.shape[3]) for map_ in teachers))
    totals = []
    for sample in range(len(students[0])):
        stages = []
        for student, teacher in zip(students, teachers, strict=True):
            values, t_rows = _right_singular(double(teacher[sample]))
            _, s_rows = _right_singular(double(student[sample]))
            scale = unit(values[:k])
            s_kept, t_kept = [], []
            for at_k, row in enumerate(t_rows[:k]):
                row = row if row[np.argmax(np.abs(row))] > 0 else -row
                cosines = double([other @ row for other in s_rows[: k + 3]])
                best = int(np.argmax(np.abs(cosines)))
                s_kept.append(np.sign(cosines[best]) * s_rows[best] * scale[at_k])
                t_kept.append(row * scale[at_k])
            stages.append((s_kept, t_kept))
        total = 0.0
        for (s_a, t_a), (s_b, t_b) in pairwise(stages):
            for at_k in range(k):
                for i in range(len(s_b[at_k])):
                    for j in range(len(s_a[at_k])):
                        of_s = math.exp(-((s_b[at_k][i] - s_a[at_k][j]) ** 2) / 8)
                        of_t = math.exp(-((t_b[at_k][i] - t_a[at_k][j]) ** 2) / 8)
                        total += (of_s - of_t) ** 2
        totals.append(total * (math.sqrt(k) / 2 if variant == "paper" else 1.0))
    return double(totals)


def ofd_margin(norm_weight_C: Array, norm_bias_C: Array) -> Array:
    """The mean of a normal value of this deviation and mean, given that it is negative: Heo et al., ICCV 2019, the margin m_C,
    from the teacher's batch norm before the ReLU. Where a value is negative with a chance of 0.001 or less: −3·|deviation|.
    A deviation of 0 has the limit min(mean, 0)."""
    out = []
    for weight, mean in zip(norm_weight_C, norm_bias_C, strict=True):
        deviation = abs(float(weight))
        if deviation == 0:
            out.append(min(float(mean), 0.0))
            continue
        chance = 0.5 * (1 + math.erf(-mean / deviation / math.sqrt(2)))
        density = math.exp(-((mean / deviation) ** 2) / 2) / math.sqrt(2 * math.pi)
        out.append(mean - deviation * density / chance if chance > 0.001 else -3 * deviation)
    return double(out)


def ofd(students: Maps, teachers: Maps, connectors: Sequence[Layer], margins: Sequence[Array]) -> Array:
    """The partial L2 distance to the teacher's margin ReLU, per sample, summed over C, H and W. Heo et al., ICCV 2019, d_p and
    σ_m: 0 where s ≤ t' ≤ 0, else (t' − s)², with t' = max(t, m_C); maps BEFORE the ReLU on both sides.

    Stage i of n weighs 1/2^(n − 1 − i) (authors, mdistiller); weight 1e-3 on CIFAR, 1e-4 on ImageNet; the connector is a 1x1
    convolution without bias and a batch norm. mdistiller pools the teacher's map to the student's size. Both codes run the
    TEACHER with batch statistics, which we do not.
    """
    stages = []
    for i, (student, teacher, connector, margin_C) in enumerate(zip(students, teachers, connectors, margins, strict=True)):
        s = conv2d(double(student), connector.weight, connector.bias, padding=connector.weight.shape[2] // 2)
        s = s if connector.norm is None else batch_norm(s, *connector.norm)
        t = np.maximum(basic.adaptive_avg_pool2d(double(teacher), *s.shape[2:]), margin_C[None, :, None, None])
        partial = np.where((s <= t) & (t <= 0), 0.0, (t - s) ** 2)
        stages.append(flat(partial).sum(axis=1) / 2.0 ** (len(students) - 1 - i))
    return _per_sample(stages)


class Fusion(NamedTuple):
    """One attention-based fusion of ReviewKD. `attention` (2, 2·mid, 1, 1) and its bias are None in the deepest."""

    inner: Layer
    outer: Layer
    attention: Array | None = None
    attention_bias: Array | None = None


def reviewkd_fuse(students: Maps, fusions: Sequence[Fusion], sizes: Sequence[tuple[int, int]]) -> list[Array]:
    """The student's fused maps, shallowest first, with the teacher's channels and `sizes`. Chen et al., CVPR 2021, the
    attention-based fusion (ABF) of section 3.3, from the deepest map to the shallowest.

    Each: x = BN(conv1x1(map)); unless deepest, y = the previous residual, nearest, at x's size, and
    x ← x·z₀ + y·z₁ with z = sigmoid(conv1x1([x; y])); x goes on as the residual after being resized (nearest) to the
    teacher's size; the result is BN(conv3x3(x)). Convolutions without bias but the attention's.
    """
    results: list[Array] = []
    residual: Array | None = None
    for student, fusion, size in zip(reversed(students), reversed(fusions), reversed(sizes), strict=True):
        x = conv2d(double(student), fusion.inner.weight)
        x = x if fusion.inner.norm is None else batch_norm(x, *fusion.inner.norm)
        if residual is not None and fusion.attention is not None:
            y = basic.nearest(residual, *x.shape[2:])
            z = 1 / (1 + np.exp(-conv2d(np.concatenate([x, y], axis=1), fusion.attention, fusion.attention_bias)))
            x = x * z[:, :1] + y * z[:, 1:]
        residual = x if x.shape[2:] == size else basic.nearest(x, *size)
        out = conv2d(residual, fusion.outer.weight, padding=1)
        results.insert(0, out if fusion.outer.norm is None else batch_norm(out, *fusion.outer.norm))
    return results


def hcl(fused: Maps, teachers: Maps) -> Array:
    """Hierarchical context loss, per sample, summed over stages. Chen et al., CVPR 2021, section 3.4.

    The mean over C, H and W of the squared difference, plus the same of both pooled to 4, 2 and 1 pixels with weights
    ½, ¼, ⅛, over the sum of the weights; a level not smaller than the map is left out and the next takes its weight.
    """
    stages = []
    for s, t in zip(fused, teachers, strict=True):
        s, t = double(s), double(t)
        total, weight, weights = flat((s - t) ** 2).mean(axis=1), 1.0, 1.0
        for level in (4, 2, 1):
            if level >= s.shape[2]:
                continue
            weight /= 2
            weights += weight
            gap = basic.adaptive_avg_pool2d(s, level, level) - basic.adaptive_avg_pool2d(t, level, level)
            total = total + weight * flat(gap**2).mean(axis=1)
        stages.append(total / weights)
    return _per_sample(stages)


def reviewkd(students: Maps, teachers: Maps, fusions: Sequence[Fusion]) -> Array:
    """`hcl` of `reviewkd_fuse`, per sample. Chen et al., CVPR 2021. The last of both lists are the pooled features as 1x1 maps;
    the teacher's maps are before their ReLU, the student's after it on CIFAR and before it on ImageNet (mdistiller)."""
    return hcl(reviewkd_fuse(students, fusions, [t.shape[2:] for t in teachers]), teachers)


def simkd(
    student_BCHW: Array, teacher_BCHW: Array, projector: Sequence[Layer], classifier: tuple[Array, Array]
) -> tuple[Array, Array]:
    """(loss (B,), logits (B, K)). Chen et al., CVPR 2022: ‖F_t − P(F_s)‖², the mean over C, H and W, of the last maps before
    pooling; the prediction is the teacher's classifier (weight_KD, bias_K) of the projected map's mean.

    P: 1x1, 3x3 and 1x1 convolutions without bias, each with batch norm and ReLU; the larger map is average-pooled. It is the
    only loss (task 0, kd 0, weight 1).
    """
    x, t = same_size(double(student_BCHW), double(teacher_BCHW))
    for layer in projector:
        x = conv2d(x, layer.weight, layer.bias, padding=layer.weight.shape[2] // 2)
        x = relu(x if layer.norm is None else batch_norm(x, *layer.norm))
    return flat((t - x) ** 2).mean(axis=1), basic.linear(basic.global_avg_pool(x), *classifier)


def srrl(
    student: Array,
    teacher_BD: Array,
    teacher_logits_BK: Array,
    connector: Layer,
    classifier: tuple[Array, Array],
    variant: str = "official",
) -> tuple[Array, Array]:
    """(L_FM, L_SR), per sample. Yang et al., ICLR 2021: L_FM the mean over D of (h_t − h_s)², L_SR the mean over K of
    (z_t − (W_t·h_s + b_t))², W_t and b_t the teacher's classifier. Weights 1, task 1 (ImageNet).

    variant `official`: h_s is the mean over pixels of ReLU(BN(conv1x1(last map))), `student` is (B, C, H, W); `simkd` (the
    SimKD repository's): the connector sees the pooled vector, `student` is (B, C).
    """
    x = double(student) if variant == "official" else double(student)[:, :, None, None]
    x = conv2d(x, connector.weight, connector.bias)
    hidden_BD = basic.global_avg_pool(relu(x if connector.norm is None else batch_norm(x, *connector.norm)))
    matching = ((double(teacher_BD) - hidden_BD) ** 2).mean(axis=1)
    regression = ((double(teacher_logits_BK) - basic.linear(hidden_BD, *classifier)) ** 2).mean(axis=1)
    return matching, regression


class Embed(NamedTuple):
    """Two linear layers with a ReLU between, of SemCKD's queries and keys."""

    weight_1: Array
    bias_1: Array
    weight_2: Array
    bias_2: Array


def semckd_attention(students: Maps, teachers: Maps, queries: Sequence[Embed], keys: Sequence[Embed], soft: float = 1.0) -> Array:
    """(B, student stages, teacher stages), each row a softmax over the teacher's stages. Chen et al., AAAI 2021, α.

    A stage's B·B Gram matrix of flattened maps is read row by row: unit(W₂·relu(W₁·row + b₁) + b₂). W₁ reads D values, the
    batch size it was made for; a smaller batch's rows are padded with zeros.
    """

    def embed(x: Array, parameters: Embed) -> list[Array]:
        gram = flat(double(x)) @ flat(double(x)).T
        padded = np.pad(gram, ((0, 0), (0, parameters.weight_1.shape[1] - len(gram))))
        hidden = relu(basic.linear(padded, parameters.weight_1, parameters.bias_1))
        return [unit(row) for row in basic.linear(hidden, parameters.weight_2, parameters.bias_2)]

    q = [embed(x, e) for x, e in zip(students, queries, strict=True)]
    k = [embed(x, e) for x, e in zip(teachers, keys, strict=True)]
    batch = len(students[0])
    return double([[basic.softmax(double([q_l[b] @ k_m[b] / soft for k_m in k])) for q_l in q] for b in range(batch)])


def semckd(
    students: Maps,
    teachers: Maps,
    queries: Sequence[Embed],
    keys: Sequence[Embed],
    projections: Sequence[Sequence[Sequence[Layer]]],
    soft: float = 1.0,
) -> Array:
    """Σ_l Σ_m α[b, l, m]·mean_chw (proj_lm(s_l) − t_m)² / (number of student stages), per sample. Chen et al., AAAI 2021,
    L_SemCKD as their code reduces it; weight 400, task 1, kd 1.

    projections[l][m]: 1x1, 3x3 and 1x1 convolutions without bias; batch norm and ReLU follow all but the last. The larger of
    a pair of maps is average-pooled.
    """
    attention = semckd_attention(students, teachers, queries, keys, soft)
    total = np.zeros(len(students[0]))
    for at_s, student in enumerate(students):
        for at_t, teacher in enumerate(teachers):
            x, t = same_size(double(student), double(teacher))
            for layer in projections[at_s][at_t]:
                x = conv2d(x, layer.weight, layer.bias, padding=layer.weight.shape[2] // 2)
                x = x if layer.norm is None else relu(batch_norm(x, *layer.norm))
            total += attention[:, at_s, at_t] * flat((x - t) ** 2).mean(axis=1)
    return total / len(students)
