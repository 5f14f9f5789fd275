"""The layers that a loss may need, in plain float64 numpy, and numerical derivatives.

Shapes: x_BCHW a batch of maps, weight_OIHW a convolution's kernel. Nothing here is fast.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

TINY = 1e-12  # a norm is never divided by less: a zero vector stays zero


def double(x: object) -> Array:
    """x as float64."""
    return np.asarray(x, dtype=np.float64)


def log_softmax(logits_K: Array) -> Array:
    """log of the softmax of ONE row."""
    top = logits_K.max()
    return logits_K - top - np.log(np.exp(logits_K - top).sum())


def softmax(logits_K: Array) -> Array:
    """softmax of ONE row."""
    return np.exp(log_softmax(logits_K))


def kl(log_p_K: Array, log_q_K: Array) -> float:
    """KL(p ‖ q) of two distributions given as logarithms; an outcome that p never has adds nothing."""
    return float(sum(np.exp(a) * (a - b) for a, b in zip(log_p_K, log_q_K, strict=True) if a > -np.inf))


def unit(x: Array) -> Array:
    """x divided by its length over ALL its elements, or by 1e-12 if it is shorter."""
    return x / max(float(np.sqrt((x * x).sum())), TINY)


def flat(x: Array) -> Array:
    """(B, …) -> (B, D)."""
    return x.reshape(len(x), int(np.prod(x.shape[1:])))


def relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def leaky_relu(x: Array, slope: float = 0.1) -> Array:
    return np.where(x > 0, x, slope * x)


def linear(x_BI: Array, weight_OI: Array, bias_O: Array | None = None) -> Array:
    out = np.array([[row @ w for w in weight_OI] for row in x_BI]).reshape(len(x_BI), len(weight_OI))
    return out if bias_O is None else out + bias_O


def conv2d(x_BCHW: Array, weight_OIHW: Array, bias_O: Array | None = None, stride: int = 1, padding: int = 0) -> Array:
    """Cross-correlation, as every framework's convolution, written output pixel by output pixel."""
    x = np.pad(x_BCHW, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    outputs, _, kernel_h, kernel_w = weight_OIHW.shape
    height, width = (x.shape[2] - kernel_h) // stride + 1, (x.shape[3] - kernel_w) // stride + 1
    out = np.zeros((len(x), outputs, height, width))
    for i in range(height):
        for j in range(width):
            window = x[:, :, i * stride : i * stride + kernel_h, j * stride : j * stride + kernel_w]
            for o in range(outputs):
                out[:, o, i, j] = (window * weight_OIHW[o]).sum(axis=(1, 2, 3))
    return out if bias_O is None else out + bias_O[None, :, None, None]


def conv_transpose2d(x_BCHW: Array, weight_IOHW: Array, bias_O: Array | None = None, stride: int = 1, padding: int = 0) -> Array:
    """The transpose of `conv2d`: each input pixel stamps its kernel on the output, whose border of `padding` is cut off."""
    inputs, outputs, kernel_h, kernel_w = weight_IOHW.shape
    batch, _, height, width = x_BCHW.shape
    out = np.zeros((batch, outputs, (height - 1) * stride + kernel_h, (width - 1) * stride + kernel_w))
    for i in range(height):
        for j in range(width):
            for c in range(inputs):
                stamp = x_BCHW[:, c, i, j][:, None, None, None] * weight_IOHW[c]
                out[:, :, i * stride : i * stride + kernel_h, j * stride : j * stride + kernel_w] += stamp
    out = out[:, :, padding : out.shape[2] - padding, padding : out.shape[3] - padding]
    return out if bias_O is None else out + bias_O[None, :, None, None]


def batch_norm(x: Array, weight_C: Array, bias_C: Array, eps: float = 1e-5) -> Array:
    """In training: each channel of (B, C) or (B, C, H, W) less its mean, over sqrt(its biased variance + eps)."""
    out = np.empty_like(x)
    for c in range(x.shape[1]):
        mean = x[:, c].mean()
        variance = ((x[:, c] - mean) ** 2).mean()
        out[:, c] = (x[:, c] - mean) / np.sqrt(variance + eps) * weight_C[c] + bias_C[c]
    return out


def adaptive_avg_pool2d(x_BCHW: Array, height: int, width: int) -> Array:
    """Output pixel (i, j) is the mean of rows floor(i·H/height) to ceil((i+1)·H/height), columns alike; bins may overlap."""
    full_h, full_w = x_BCHW.shape[2:]
    out = np.empty((*x_BCHW.shape[:2], height, width))
    for i in range(height):
        for j in range(width):
            top, bottom = i * full_h // height, -(-(i + 1) * full_h // height)
            left, right = j * full_w // width, -(-(j + 1) * full_w // width)
            out[:, :, i, j] = x_BCHW[:, :, top:bottom, left:right].mean(axis=(2, 3))
    return out


def global_avg_pool(x_BCHW: Array) -> Array:
    return x_BCHW.mean(axis=(2, 3))


def nearest(x_BCHW: Array, height: int, width: int) -> Array:
    """Output pixel (i, j) is input pixel (floor(i·H/height), floor(j·W/width))."""
    full_h, full_w = x_BCHW.shape[2:]
    out = np.empty((*x_BCHW.shape[:2], height, width))
    for i in range(height):
        for j in range(width):
            out[:, :, i, j] = x_BCHW[:, :, i * full_h // height, j * full_w // width]
    return out


def same_size(student_BCHW: Array, teacher_BCHW: Array) -> tuple[Array, Array]:
    """Both maps, the larger one average-pooled to the size of the smaller one; channels as they were."""
    if student_BCHW.shape[2:] == teacher_BCHW.shape[2:]:
        return student_BCHW, teacher_BCHW
    if student_BCHW.shape[2] > teacher_BCHW.shape[2]:
        return adaptive_avg_pool2d(student_BCHW, *teacher_BCHW.shape[2:]), teacher_BCHW
    return student_BCHW, adaptive_avg_pool2d(teacher_BCHW, *student_BCHW.shape[2:])


def derivative(function: Callable[[Array], float], x: Array, step: float = 1e-4) -> Array:
    """d function / dx, element by element: five-point central differences, whose error is of the order of step⁴.

    Away from kinks the result is right to about 1e-10 of the function's size. x is left as it was.
    """
    x = double(x).copy()
    out = np.zeros_like(x)
    for at in np.ndindex(*x.shape):
        here = x[at]
        values = []
        for move in (-2, -1, 1, 2):
            x[at] = here + move * step
            values.append(function(x))
        x[at] = here
        out[at] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
    return out


def derivatives(function: Callable[..., float], arrays: Sequence[Array], step: float = 1e-4) -> list[Array]:
    """`derivative` of function(*arrays) by each of its arguments."""

    def alone(at: int) -> Callable[[Array], float]:
        return lambda x: function(*[x if i == at else a for i, a in enumerate(arrays)])

    return [derivative(alone(i), a, step) for i, a in enumerate(arrays)]
