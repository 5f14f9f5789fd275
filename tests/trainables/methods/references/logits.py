"""Losses of the logits alone. Shapes: student_BK and teacher_BK logits, labels_B whole numbers."""

from collections.abc import Sequence

import numpy as np

from tests.trainables.methods.references.basic import Array, Ints, double, kl, log_softmax, softmax


def kd(student_BK: Array, teacher_BK: Array, temperature: float = 4.0) -> Array:
    """T²·KL(softmax(z_t/T) ‖ softmax(z_s/T)), per sample; summed over classes.

    Hinton, Vinyals & Dean 2015, equation 1 and the factor T² of section 2. RepDistiller and mdistiller agree: T = 4, weights
    0.1 (task) and 0.9 (kd) on CIFAR-100; mdistiller's ImageNet takes T = 1, 0.5 and 0.5.
    """
    rows = zip(double(student_BK), double(teacher_BK), strict=True)
    return double([temperature**2 * kl(log_softmax(t / temperature), log_softmax(s / temperature)) for s, t in rows])


def hard_label(student_BK: Array, teacher_BK: Array) -> Array:
    """−log softmax(z_s) of the class argmax z_t, per sample: the second half of equation 3 of Touvron et al., ICML 2021."""
    rows = zip(double(student_BK), double(teacher_BK), strict=True)
    return double([-log_softmax(s)[max(range(len(t)), key=lambda k: t[k])] for s, t in rows])


def dkd_parts(student_BK: Array, teacher_BK: Array, labels_B: Ints, temperature: float = 4.0) -> tuple[Array, Array]:
    """(TCKD, NCKD), each times T², per sample: the two terms of equation 7 of Zhao et al., CVPR 2022, without α and β.

    TCKD is the KL between the pairs (p of the label, p of all others); NCKD the KL between the softmaxes over the classes that
    are not the label. mdistiller subtracts 1000 from the label's logit instead of leaving it out: equal in float64.
    """
    target, others = [], []
    for s, t, label in zip(double(student_BK), double(teacher_BK), labels_B, strict=True):
        rest = [k for k in range(len(s)) if k != label]
        pairs, softmaxes = [], []
        for row in (t / temperature, s / temperature):
            among_rest = log_softmax(row[rest])
            whole = log_softmax(row)
            log_of_rest = whole[rest[0]] - among_rest[0]  # p(k) = p(rest)·p(k | rest), for any k of the rest
            pairs.append(double([whole[label], log_of_rest]))
            softmaxes.append(among_rest)
        target.append(temperature**2 * kl(pairs[0], pairs[1]))
        others.append(temperature**2 * kl(softmaxes[0], softmaxes[1]))
    return double(target), double(others)


def dkd(
    student_BK: Array, teacher_BK: Array, labels_B: Ints, alpha: float = 1.0, beta: float = 8.0, temperature: float = 4.0
) -> Array:
    """α·TCKD + β·NCKD, per sample: equation 7 of Zhao et al., CVPR 2022. mdistiller: α 1, β 2 to 8 by pair, T 4, task 1,
    the weight rising over the first 20 epochs."""
    target, others = dkd_parts(student_BK, teacher_BK, labels_B, temperature)
    return alpha * target + beta * others


def _one_less_pearson(x: Array, y: Array) -> float:
    """1 − ρ(x, y), with 1e-8 ADDED to the product of the lengths as the authors' code has it."""
    x, y = x - x.mean(), y - y.mean()
    return float(1 - (x * y).sum() / (np.sqrt((x * x).sum()) * np.sqrt((y * y).sum()) + 1e-8))


def dist_inter(student_BK: Array, teacher_BK: Array, temperature: float = 1.0) -> Array:
    """τ²·(1 − Pearson of the sample's two softmaxes), per sample: L_inter of DIST, Huang et al., NeurIPS 2022."""
    rows = zip(double(student_BK), double(teacher_BK), strict=True)
    return double([temperature**2 * _one_less_pearson(softmax(s / temperature), softmax(t / temperature)) for s, t in rows])


def dist_intra(student_BK: Array, teacher_BK: Array, temperature: float = 1.0) -> float:
    """τ² · mean over classes of (1 − Pearson of the class's two columns of softmaxes), a scalar: L_intra of DIST.

    A batch of one has columns without variance, whose correlation is 0, hence the value τ².
    """
    s = double([softmax(row / temperature) for row in double(student_BK)])
    t = double([softmax(row / temperature) for row in double(teacher_BK)])
    return float(temperature**2 * np.mean([_one_less_pearson(s[:, k], t[:, k]) for k in range(s.shape[1])]))


def nkd(
    student_BK: Array, teacher_BK: Array, labels_B: Ints, gamma: float = 1.5, temperature: float = 1.0, target_weight: float = 1.0
) -> Array:
    """−T_t·log S_t − γ·λ²·Σ_{k≠t} N(T_k)·log N(S_k), per sample, N the softmax over the classes that are not the label.

    Yang et al., ICCV 2023 (arXiv 2303.13005), the equation of L_nkd. T_t and S_t are of the plain softmax, λ = `temperature` is
    of the rest only. cls_KD: λ 1, γ 1.5, task weight 1. It is a cross-entropy: equal networks do not give 0.
    """
    out = []
    for s, t, label in zip(double(student_BK), double(teacher_BK), labels_B, strict=True):
        rest = [k for k in range(len(s)) if k != label]
        of_label = -softmax(t)[label] * log_softmax(s)[label]
        of_rest = -(softmax(t[rest] / temperature) * log_softmax(s[rest] / temperature)).sum()
        out.append(target_weight * of_label + gamma * temperature**2 * of_rest)
    return double(out)


def standardise(logits_BK: Array, variant: str = "official") -> Array:
    """Each row less its mean, over its standard deviation plus 1e-7: the Z-score of Sun et al., CVPR 2024, algorithm 1.

    variant `paper`: the deviation of a whole population (1/K); `official`: their code's unbiased one (1/(K − 1)).
    It is put before any loss of logits, of teacher and student both; their base temperature is 2, their kd weight 9.
    """
    out = []
    for row in double(logits_BK):
        count = len(row) - (variant == "official")
        deviation = np.sqrt(((row - row.mean()) ** 2).sum() / count)
        out.append((row - row.mean()) / (deviation + 1e-7))
    return double(out)


def ttm(student_BK: Array, teacher_BK: Array, exponent: float) -> Array:
    """KL(p_t^γ / Σ p_t^γ ‖ softmax(z_s)), per sample: only the teacher is softened, and no T² (γ = `exponent` = 1/T).

    Zheng & Yang, ICLR 2024, section 3, the objective of transformed teacher matching.
    """
    out = []
    for s, t in zip(double(student_BK), double(teacher_BK), strict=True):
        power = softmax(t) ** exponent
        out.append(kl(np.log(power / power.sum()), log_softmax(s)))
    return double(out)


def wttm(student_BK: Array, teacher_BK: Array, exponent: float) -> Array:
    """`ttm` times Σ_k p_t(k)^γ of the sample, per sample: Zheng & Yang, ICLR 2024, section 4 (weighted TTM)."""
    sums = double([(softmax(t) ** exponent).sum() for t in double(teacher_BK)])
    return sums * ttm(student_BK, teacher_BK, exponent)


def mlkd(
    student_BK: Array, teacher_BK: Array, temperatures: Sequence[float] = (2.0, 3.0, 4.0, 5.0, 6.0), variant: str = "paper"
) -> tuple[Array, float, float]:
    """(instance per sample, batch, class), each summed over the temperatures: Jin, Wang & Lin, CVPR 2023.

    instance: τ²·KL. batch: (1/B)·‖P_s P_sᵀ − P_t P_tᵀ‖² over all B·B entries. class: (1/K)·‖P_sᵀ P_s − P_tᵀ P_t‖² over all K·K.
    variant `official`: their code multiplies the already reduced losses by 0/1 masks, which makes them factors: instance and
    batch by the share of samples whose highest teacher probability is at most the median, class by the share of classes whose
    summed teacher probability is at most the median (temperature 1).
    """
    student, teacher = double(student_BK), double(teacher_BK)
    samples, classes = student.shape
    instance, batch, category = np.zeros(samples), 0.0, 0.0
    for tau in temperatures:
        instance += kd(student, teacher, tau)
        s = double([softmax(row / tau) for row in student])
        t = double([softmax(row / tau) for row in teacher])
        batch += ((s @ s.T - t @ t.T) ** 2).sum() / samples
        category += ((s.T @ s - t.T @ t) ** 2).sum() / classes
    if variant == "official":
        plain = double([softmax(row) for row in teacher])
        sure, often = plain.max(axis=1), plain.sum(axis=0)
        of_samples, of_classes = np.mean(sure <= np.percentile(sure, 50)), np.mean(often <= np.percentile(often, 50))
        instance, batch, category = instance * of_samples, batch * of_samples, category * of_classes
    return instance, float(batch), float(category)
