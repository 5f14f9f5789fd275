"""What the step-time model leaves unexplained: a Gaussian process over its relative errors.

A smooth surface around a physical mean needs no switch to another searcher: where the model fits, the process has a small
amplitude and changes nothing; where it does not, the amplitude grows, neighbours of measured points follow the measurements,
and far points become uncertain enough to be probed (Kennedy and O'Hagan 2001: model, discrepancy and noise apart). TPE on the
residuals would only rank the points; what a probe is worth, when to end and what may be left undone need a calibrated doubt.

Shapes: M points, O observations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from service.search.points import Array, Layout

AMPLITUDES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
BELIEVED, SPREAD = 0.03, 0.8  # amplitude before anything is measured: median, and standard deviation of its logarithm
OCTAVES = (1.0, 1.5, 0.8)  # of workers, batch, loader workers: how far along an axis a residual stays the same
WALK = 0.05  # relative error that each doubling of the workers adds: more nodes are other hardware, not more of the same
OWN = 0.01  # relative error of each point that its neighbours know nothing of: which convolution was chosen, what a cache holds
DRIFT = 0.002  # relative drift of the cluster for each probe, standard deviation


def steps_apart(a: Layout, b: Layout) -> Array:
    """Covariance of a random walk over the doublings of workers."""
    return WALK**2 * np.minimum.outer(np.log2(a.workers_M), np.log2(b.workers_M))


def similarity(a: Layout, b: Layout) -> Array:
    """Correlation of the residuals of two sets of points: Matérn 3/2 in octaves of each axis, less across categories."""
    square = np.zeros((len(a.workers_M), len(b.workers_M)))
    axes = ((a.workers_M, b.workers_M), (a.batch_M, b.batch_M), (a.threads_M + 1, b.threads_M + 1))
    for (left, right), octaves in zip(axes, OCTAVES, strict=True):
        square += (np.subtract.outer(np.log2(left), np.log2(right)) / octaves) ** 2
    for left, right in zip(a.member_KM, b.member_KM, strict=True):
        square += 0.5 * np.not_equal.outer(left, right)
    distance = np.sqrt(3 * square)
    return (1 + distance) * np.exp(-distance)


@dataclass(frozen=True)
class Residuals:
    """A process conditioned on O observations; `gain_MO` turns their residuals into those of M points."""

    amplitude: float
    gain_MO: Array
    variance_M: Array

    @classmethod
    def of(
        cls,
        layout: Layout,
        rows_O: NDArray[np.int_],
        ages_O: Array,
        residual_O: Array,
        noise_O: Array,
        explained_OO: Array,
        left_O: Array,
    ) -> Residuals:
        """Condition on observations of some rows of `layout`.

        `ages_O` counts the probes since each one, `residual_O` is log(measured) − log(model), `noise_O` its standard deviation,
        `explained_OO` the covariance that the model's prior parameters give the observations: it belongs into the evidence
        (Rasmussen and Williams 2006, 2.7), or a model bent through few points would look perfect. `left_O` is what the best
        parameters leave of the residuals: no amplitude is believed under which that would be a wonder.
        """
        at = layout.take(rows_O)
        alike_OO = similarity(at, at)
        walk_OO = steps_apart(at, at)
        same_MO = np.equal.outer(np.arange(len(layout.workers_M)), rows_O)
        own_OO = OWN**2 * np.equal.outer(rows_O, rows_O)
        rest_OO = np.diag(noise_O**2) + own_OO + DRIFT**2 * np.outer(ages_O, ages_O) + walk_OO
        best, amplitude = -np.inf, BELIEVED
        usual_O = noise_O**2 + OWN**2 + np.diag(walk_OO)
        least = min(math.sqrt(max(float(np.mean(left_O**2 - usual_O)), 0.0)), AMPLITUDES[-1])
        for tried in [tried for tried in AMPLITUDES if tried >= least]:
            factor, low = cho_factor(explained_OO + tried**2 * alike_OO + rest_OO, lower=True)
            solved = cho_solve((factor, low), residual_O)
            evidence = -0.5 * float(residual_O @ solved) - float(np.log(np.diag(factor)).sum())
            evidence -= 0.5 * (np.log(tried / BELIEVED) / SPREAD) ** 2
            if evidence > best:
                best, amplitude = evidence, tried
        cross_MO = amplitude**2 * similarity(layout, at) + steps_apart(layout, at) + OWN**2 * same_MO
        factor = cho_factor(amplitude**2 * alike_OO + rest_OO, lower=True)
        gain_MO = cho_solve(factor, cross_MO.T).T
        own_M = amplitude**2 + OWN**2 + WALK**2 * np.log2(layout.workers_M)
        variance_M = np.maximum(own_M - np.einsum("mo,mo->m", gain_MO, cross_MO), 0.0)
        return cls(amplitude, gain_MO, variance_M)
