"""Losses of embeddings (B, D) and maps (B, D, H, W) without labels, in plain float64 numpy, one vector at a time."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tests.trainables.methods.references.basic import Array, double, kl, linear, log_softmax, unit


def head(x_ND: Array, parameters: Mapping[str, Array], name: str, layers: int) -> Array:
    """Linear layers `name`.0, .3, .6 …, with the layer norms `name`.1, .4 … and GELU between them."""
    for number in range(layers):
        x_ND = linear(x_ND, parameters[f"{name}.{3 * number}.weight"], parameters[f"{name}.{3 * number}.bias"])
        if number < layers - 1:
            norm = f"{name}.{3 * number + 1}"
            x_ND = np.array([normed(x) * parameters[f"{norm}.weight"] + parameters[f"{norm}.bias"] for x in x_ND])
            x_ND = np.vectorize(lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2, otypes=[float])(x_ND)
    return x_ND


def normed(x_D: Array) -> Array:
    """Layer norm without parameters, its epsilon 1e-5."""
    return (x_D - x_D.mean()) / np.sqrt(x_D.var() + 1e-5)


def of_positions(function: Callable[[Array], Array], map_DHW: Array) -> Array:
    """A map whose vector at each position is `function`'s of (1, D)."""
    _, height, width = map_DHW.shape
    rows = [[function(map_DHW[:, h, w][None])[0] for w in range(width)] for h in range(height)]
    return np.array(rows).transpose(2, 0, 1)


def bilinear(map_DHW: Array, height: int, width: int) -> Array:
    """Interpolated as images are, pixels being squares whose centers have the values."""

    def neighbors(new: int, size: int, out: int) -> tuple[int, int, float]:
        at = max((out + 0.5) * size / new - 0.5, 0.0)
        low = min(int(at), size - 1)
        return low, min(low + 1, size - 1), at - low

    found = np.zeros((len(map_DHW), height, width))
    for h in range(height):
        top, bottom, down = neighbors(height, map_DHW.shape[1], h)
        for w in range(width):
            left, right, along = neighbors(width, map_DHW.shape[2], w)
            upper = (1 - along) * map_DHW[:, top, left] + along * map_DHW[:, top, right]
            lower = (1 - along) * map_DHW[:, bottom, left] + along * map_DHW[:, bottom, right]
            found[:, h, w] = (1 - down) * upper + down * lower
    return found


def distance(student_D: Array, teacher_D: Array, loss: str) -> float:
    """The loss of two vectors: `cosine`, `smooth_l1`, `mse` or `normalized_mse`."""
    difference = np.abs(student_D - teacher_D)
    if loss == "cosine":
        return 1 - float(unit(student_D) @ unit(teacher_D))
    if loss == "smooth_l1":
        return float(np.mean([d**2 / 2 if d < 1 else d - 0.5 for d in difference]))
    if loss == "mse":
        return float(np.mean(difference**2))
    return float(((unit(student_D) - unit(teacher_D)) ** 2).sum())


def mixture(student_D: Array, teacher_D: Array, shares: Mapping[str, float]) -> float:
    return sum(share * distance(student_D, teacher_D, loss) for loss, share in shares.items())


def mean_over_positions(student_DHW: Array, teacher_DHW: Array, shares: Mapping[str, float]) -> float:
    pairs = zip(student_DHW.reshape(len(student_DHW), -1).T, teacher_DHW.reshape(len(teacher_DHW), -1).T, strict=True)
    return float(np.mean([mixture(s, t, shares) for s, t in pairs]))


def similarities_kl(
    student_D: Array, teacher_D: Array, others: tuple[Sequence[Array], Sequence[Array]], temperature: float
) -> float:
    """KL from the teacher's to the student's distribution over `others`, those of the student and those of the teacher."""
    student, teacher = (
        log_softmax(double([unit(v) @ unit(other) / temperature for other in theirs]))
        for v, theirs in zip((student_D, teacher_D), others, strict=True)
    )
    return kl(teacher, student)


def newest(rows: Sequence[Array], entering: Sequence[Array], size: int) -> list[Array]:
    """What a queue of `size` holds once `entering` have entered behind `rows`."""
    return [*rows, *entering][-size:]
