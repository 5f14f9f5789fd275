"""What the step-time model leaves unexplained: a Gaussian process over its relative errors, of points and of time.

A smooth surface around a physical mean needs no switch to another searcher: where the model fits, the process has a small
amplitude and changes nothing; where it does not, the amplitude grows, neighbours of measured points follow the measurements,
and far points become uncertain enough to be probed (Kennedy and O'Hagan 2001: model, discrepancy and noise apart). TPE on the
residuals would only rank the points; what a probe is worth, when to end and what may be left undone need a calibrated doubt.

A cluster is not the same all the time: it heats up, another tenant comes and goes. What probes of about the same time have in
common is a second process. Its covariance falls off exponentially, as that of a load which is switched on and off at random.

Shapes: M points, O observations, C chosen points.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from service.search.points import Array, Layout

AMPLITUDES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
PRIOR_AMPLITUDE, SPREAD = 0.03, 0.8  # amplitude before anything is measured: median, and standard deviation of its logarithm
DRIFTS = (0.003, 0.02, 0.08, 0.3)  # amplitude of what changes with time
STEADY, DRIFT_SPREAD = 0.003, 2.0  # that of most clusters, and how many e-folds more are no great surprise
DRIFT_PROBES = 12.0  # for how many probes the cluster stays about as it is
COMMON = 0.5  # share of a change's variance that meets all points alike; the rest meets those that are alike
OCTAVES = (1.0, 1.5, 0.8)  # of workers, batch, loader workers: how far along an axis a residual stays the same
WALK = 0.05  # relative error that each doubling of the workers adds: more nodes are other hardware, not more of the same
OWN = 0.01  # relative error of each point that its neighbours know nothing of: what a cache holds
OF_BATCH = 0.02  # of each number of images a GPU, that the next ones know nothing of: which convolution was chosen
REPEAT_SD = 0.007  # relative difference of two measurements of one point that their steps do not show


def steps_apart(a: Layout, b: Layout) -> Array:
    """Covariance of what is not smooth: a random walk over the doublings of workers, and each number of images a GPU."""
    walk = WALK**2 * np.minimum.outer(np.log2(a.workers_M), np.log2(b.workers_M))
    return np.asarray(walk + OF_BATCH**2 * np.equal.outer(a.batch_M, b.batch_M))


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
    """A process conditioned on O observations; `gain_MO` turns their residuals into those of M points, time left out."""

    amplitude: float
    drift: float
    layout: Layout
    gain_MO: Array
    cross_MO: Array
    variance_M: Array
    change_O: Array  # what the cluster's state at the time of each observation is believed to have added

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
        """Condition on observations of some rows of `layout`; a row may have several.

        `ages_O` counts the probes since each one, `residual_O` is log(measured) − log(model), `noise_O` its standard deviation,
        `explained_OO` the covariance that the model's prior parameters give the observations: it belongs into the evidence
        (Rasmussen and Williams 2006, 2.7), or a model bent through few points would look perfect. `left_O` is what the best
        parameters leave of the residuals: no amplitude is believed under which that would be a wonder.
        """
        at = layout.take(rows_O)
        alike_OO = similarity(at, at)
        apart_OO = steps_apart(at, at)
        same_MO = np.equal.outer(np.arange(len(layout.workers_M)), rows_O)
        own_OO = OWN**2 * np.equal.outer(rows_O, rows_O)
        rest_OO = np.diag(noise_O**2 + REPEAT_SD**2) + own_OO + apart_OO
        time_OO = np.exp(-np.abs(np.subtract.outer(ages_O, ages_O)) / DRIFT_PROBES) * (COMMON + (1 - COMMON) * alike_OO)
        best, amplitude, drift = -np.inf, PRIOR_AMPLITUDE, STEADY
        usual_O = noise_O**2 + OWN**2 + np.diag(apart_OO)
        unexplained = float(np.mean(left_O**2 - usual_O))
        for tried, change in product(AMPLITUDES, DRIFTS):
            if tried**2 + change**2 < min(unexplained, AMPLITUDES[-1] ** 2):
                continue
            factor, low = cho_factor(explained_OO + tried**2 * alike_OO + change**2 * time_OO + rest_OO, lower=True)
            solved = cho_solve((factor, low), residual_O)
            evidence = -0.5 * float(residual_O @ solved) - float(np.log(np.diag(factor)).sum())
            evidence -= (
                0.5 * (np.log(tried / PRIOR_AMPLITUDE) / SPREAD) ** 2 + 0.5 * (np.log(change / STEADY) / DRIFT_SPREAD) ** 2
            )
            if evidence > best:
                best, amplitude, drift = evidence, tried, change
        cross_MO = amplitude**2 * similarity(layout, at) + steps_apart(layout, at) + OWN**2 * same_MO
        factor = cho_factor(amplitude**2 * alike_OO + drift**2 * time_OO + rest_OO, lower=True)
        gain_MO = cho_solve(factor, cross_MO.T).T
        variance_M = np.maximum(_variance(amplitude, layout) - np.einsum("mo,mo->m", gain_MO, cross_MO), 0.0)
        whole = cho_factor(explained_OO + amplitude**2 * alike_OO + drift**2 * time_OO + rest_OO, lower=True)
        change_O = drift**2 * time_OO @ cho_solve(whole, residual_O)
        return cls(amplitude, drift, layout, gain_MO, cross_MO, variance_M, change_O)

    def covariance(self, rows_C: NDArray[np.int_]) -> Array:
        """Of the residuals of some points, as the observations leave it: CC."""
        some = self.layout.take(rows_C)
        prior_CC = self.amplitude**2 * similarity(some, some) + steps_apart(some, some) + OWN**2 * np.eye(len(rows_C))
        return np.asarray(prior_CC - self.gain_MO[rows_C] @ self.cross_MO[rows_C].T)


def _variance(amplitude: float, layout: Layout) -> Array:
    return np.asarray(amplitude**2 + OWN**2 + OF_BATCH**2 + WALK**2 * np.log2(layout.workers_M))
