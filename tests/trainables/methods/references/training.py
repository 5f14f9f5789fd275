"""Ways of training: DOT's update of parameters, mutual learning, several teachers, PS-KD. Shapes: logits (B, K)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.trainables.methods.references.basic import Array, Ints, double, kl, log_softmax, softmax
from tests.trainables.methods.references.logits import kd


class DotState(NamedTuple):
    """One parameter and its two momentum buffers, None before the first gradient of their kind."""

    parameter: Array
    task: Array | None = None
    kd: Array | None = None


def dot_update(
    state: DotState,
    task_gradient: Array | None,
    kd_gradient: Array | None,
    lr: float,
    momentum: float = 0.9,
    delta: float = 0.075,
    weight_decay: float = 0.0,
) -> DotState:
    """One step of the distillation-oriented trainer: Zhao et al., ICCV 2023, algorithm 1, and mdistiller's handling of the rest.

    v_task ← g_task + (μ − Δ)·v_task, v_kd ← g_kd + (μ + Δ)·v_kd, θ ← θ − lr·(v_task + v_kd). Weight decay is part of the task's
    gradient. A parameter with one gradient only (None for the other) has momentum μ and the weight decay. Buffers begin at 0.
    As in mdistiller the first distillation gradient of a parameter that has only that one goes without the decay.
    Δ is 0.075 on CIFAR-100 and 0.09 on ImageNet.
    """
    parameter = double(state.parameter)
    task, distilled = state.task, state.kd
    moved = np.zeros_like(parameter)
    if task_gradient is not None:
        keep = momentum - delta if kd_gradient is not None else momentum
        task = task_gradient + weight_decay * parameter + (0.0 if task is None else keep * task)
        moved = moved + task
    if kd_gradient is not None:
        keep = momentum + delta if task_gradient is not None else momentum
        decay = 0.0 if task_gradient is not None or distilled is None else weight_decay * parameter
        distilled = kd_gradient + decay + (0.0 if distilled is None else keep * distilled)
        moved = moved + distilled
    return DotState(parameter - lr * moved, task, distilled)


def cross_entropy(logits_BK: Array, labels_B: Ints) -> Array:
    """−log softmax of the label, per sample."""
    return double([-log_softmax(row)[label] for row, label in zip(double(logits_BK), labels_B, strict=True)])


def mutual(logits: Sequence[Array], temperature: float = 1.0) -> list[Array]:
    """Each student's distillation term, per sample: the mean over its K − 1 peers of T²·KL(peer ‖ student), the peers constants.

    Zhang et al., CVPR 2018 (two students: KL(p₂ ‖ p₁) for the first), T = 1, weight 1 beside the cross-entropy. All terms are
    of the same parameters; the paper updates one student and then recomputes its output for the next.
    """
    out = []
    for i, own in enumerate(logits):
        peers = [kd(own, other, temperature) for j, other in enumerate(logits) if j != i]
        out.append(np.mean(peers, axis=0))
    return out


def several_teachers(
    student_BK: Array,
    teachers: Sequence[Array],
    weights: Sequence[float],
    temperature: float = 4.0,
    variant: str = "probabilities",
) -> Array:
    """T²·KL(target ‖ softmax(z_s/T)), per sample; the weights sum to 1.

    variant `probabilities` (Hinton et al. 2015; You et al., KDD 2017): the target is Σ_j w_j·softmax(z_j/T). `logits`: it is
    softmax(Σ_j w_j·z_j/T). `losses`: Σ_j w_j·T²·KL(p_j ‖ p_s), whose gradient is that of `probabilities`.
    """
    assert abs(sum(weights) - 1) < 1e-12
    if variant == "losses":
        return double(np.sum([w * kd(student_BK, t, temperature) for w, t in zip(weights, teachers, strict=True)], axis=0))
    out = []
    for b, s in enumerate(double(student_BK)):
        rows = [double(t)[b] / temperature for t in teachers]
        if variant == "logits":
            target = log_softmax(double(sum(w * row for w, row in zip(weights, rows, strict=True))))
        else:
            target = np.log(double(sum(w * softmax(row) for w, row in zip(weights, rows, strict=True))))
        out.append(temperature**2 * kl(target, log_softmax(s / temperature)))
    return double(out)


def ps_kd_alpha(epoch: int, epochs: int, last: float = 0.8) -> float:
    """α of epoch 1, 2, …: it rises linearly to `last` at the last epoch. Kim et al., ICCV 2021."""
    return last * epoch / epochs


def ps_kd(student_BK: Array, previous_BK: Array, labels_B: Ints, alpha: float) -> Array:
    """Cross-entropy with the target (1 − α)·one-hot + α·p_previous, per sample, temperature 1. Kim et al., ICCV 2021 (PS-KD).

    previous_BK are the PROBABILITIES that the student gave these samples an epoch before; the authors' code keeps the last
    training pass's, and the one-hot labels in the first epoch. It takes the place of the task's loss.
    """
    out = []
    for s, p, label in zip(double(student_BK), double(previous_BK), labels_B, strict=True):
        one_hot = double([k == label for k in range(len(s))])
        out.append(-(((1 - alpha) * one_hot + alpha * p) * log_softmax(s)).sum())
    return double(out)
