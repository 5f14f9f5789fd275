"""What is believed of every point after the probes so far: the step-time model, its residuals, and the doubt about both.

Shapes: M points, O observations, S draws of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from service.search.formulas import times
from service.search.front import Rows, rivals
from service.search.measured import MODEL_ERROR, Measured
from service.search.points import Array, Flags, Layout
from service.search.residuals import DRIFT, Residuals
from service.search.step_time import StepTime

DRAWS = 192
SLOW = 5.0  # standard deviations by which a probe is too slow for the model: an outlier, maybe, and not worth its own word


@dataclass(frozen=True)
class Belief:
    """The logarithm of each point's cost (seconds of an image, or of a GPU for an image) as weighted draws and a normal rest."""

    value_SM: Array
    weights_S: Array
    rest_M: Array  # standard deviation that the draws do not show
    offset_M: Array  # cost − step, in logarithms
    amplitude: float  # of what the model leaves unexplained, relative
    rows_O: Rows  # of the points that ran
    cost_O: Array  # the logarithm of their cost, their own measurement and the model's word taken together
    rival_M: Rows  # row of the measured point that each one has to beat
    handicap_M: Array  # what that one's cost counts more, in logarithms

    @property
    def best(self) -> int:
        """Row of the best measured point."""
        return int(self.rows_O[np.argmin(self.cost_O)])

    @property
    def value_M(self) -> Array:
        """Mean of the logarithm of the cost."""
        return self.weights_S @ self.value_SM

    @property
    def step_s_M(self) -> Array:
        """Seconds of a step."""
        return np.exp(self.value_M - self.offset_M)

    @property
    def spread_M(self) -> Array:
        """Relative standard deviation of the step time."""
        return np.sqrt(self.weights_S @ (self.value_SM - self.value_M) ** 2 + self.rest_M**2)

    def ahead(self) -> tuple[Array, Array]:
        """By how much each point is cheaper than its rival: as draws (SM, relative), and the standard deviation of the rest."""
        rest_M = np.sqrt(self.rest_M**2 + self.rest_M[self.rival_M] ** 2 + DRIFT**2)
        return self.value_SM[:, self.rival_M] + self.handicap_M - self.value_SM, rest_M

    def gain_M(self) -> Array:
        """Expected improvement on the rival, relative (Mockus 1978; Jones et al. 1998), over all draws."""
        ahead_SM, rest_M = self.ahead()
        scaled_SM = ahead_SM / rest_M
        density_SM = np.exp(-0.5 * scaled_SM**2) / math.sqrt(2 * math.pi)
        return np.asarray(self.weights_S @ (ahead_SM * ndtr(scaled_SM) + rest_M * density_SM))

    def beats_M(self, margin: float) -> Array:
        """Probability that a point beats its rival by more than `margin`, relative."""
        ahead_SM, rest_M = self.ahead()
        return np.asarray(self.weights_S @ ndtr((ahead_SM - math.log1p(margin)) / rest_M))

    def bound(self, among_M: Flags, doubt: float) -> float:
        """The least share, 0.0 or more, by which no point of `among_M` beats its rival with a probability above `doubt`."""
        ahead_SM, rest_M = (part[..., among_M] for part in self.ahead())

        def doubted(log_margin: float) -> float:
            return float((self.weights_S @ ndtr((ahead_SM - log_margin) / rest_M)).max(initial=0.0)) - doubt

        if doubted(0.0) <= 0:
            return 0.0
        return math.expm1(brentq(doubted, 0.0, float(np.max(ahead_SM)) + 9 * float(np.max(rest_M))))


def believe(
    prior: StepTime,
    model: StepTime,
    measured: Measured,
    rows: Sequence[int],
    ages: Sequence[int],
    pending: Sequence[int],
    layout: Layout,
    offset_M: Array,
    seed: Sequence[int],
    along_front: bool,
    lost_M: Flags,
) -> Belief:
    """The belief after `measured` at `rows` of `layout`, each told `ages` probes ago; `model` is the prior fitted to them.

    Pending rows are believed: as if each had brought what the model says (Ginsbourger et al. 2010, "kriging believer").
    A point's rival is the best measured one, or with `along_front` the one that keeps it off the front of speed and cost.
    What is `lost` cannot run any more and is nobody's rival.
    """
    count = len(rows)
    if pending:
        guess = times(model.mean_P, layout.take(pending))
        measured = measured.joined(np.log(np.stack([guess.step, guess.work, guess.forward])), layout.take([*rows, *pending]))
        model = prior.fitted(measured)
    at_O = np.array([*rows, *pending])
    age_O = np.array([*ages, *(0 for _ in pending)], dtype=float)
    log_O, noise_O = measured.logs_3M[0], measured.noise_M
    J_OP = model.jacobian(measured.layout)[0]
    residual_O = log_O - np.log(times(model.mean_P, measured.layout).step)
    slow_O = np.where(residual_O > SLOW * np.hypot(noise_O, MODEL_ERROR["step"]), residual_O / 2, 0.0)
    explained_OO = J_OP @ prior.covariance_PP @ J_OP.T
    away_O = residual_O + J_OP @ (model.mean_P - prior.mean_P)
    rest = Residuals.of(layout, at_O, age_O, away_O, np.maximum(noise_O, slow_O), explained_OO, residual_O)

    logs_SP, weights_S = model.draws(prior, measured, DRAWS, np.random.default_rng(seed))
    step_SM = np.log(times(logs_SP, layout).step)
    value_SM = step_SM + (log_O - step_SM[:, at_O]) @ rest.gain_MO.T + offset_M
    # A point that was measured slow is not the best, whatever the model says of it.
    least_O = np.maximum((weights_S @ value_SM)[at_O], log_O - 2 * noise_O + offset_M[at_O])[:count]
    least_O[lost_M[at_O[:count]]] = np.inf
    place_M, handicap_M = np.full(len(offset_M), np.argmin(least_O)), np.zeros(len(offset_M))
    if along_front:
        place_M, handicap_M = rivals(layout.workers_M, layout.workers_M[at_O[:count]], least_O)
    rest_M, at_O = np.sqrt(rest.variance_M), at_O[:count]
    return Belief(value_SM, weights_S, rest_M, offset_M, rest.amplitude, at_O, least_O, at_O[place_M], handicap_M)
