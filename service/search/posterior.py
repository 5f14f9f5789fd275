"""The posterior of every point after the probes so far: the step-time model, its residuals, and the doubt about both.

Shapes: M points, O observations (a point may have several), U points that were measured, C chosen ones of them, S draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from service.search.disturbance import Disturbances, undisturbed
from service.search.fit_data import MODEL_ERROR, Measured
from service.search.formulas import step_times
from service.search.pareto_front import Rows, incumbents
from service.search.points import Array, Flags, Layout
from service.search.residual_model import REPEAT_SD, Residuals
from service.search.step_time_model import StepTime

DRAWS = 192
SLOW = 5.0  # standard deviations by which a probe is too slow for the model: an outlier, maybe, and given less weight
CHANGED = 0.02  # of the cluster's state, from which on the model is fitted again without it


@dataclass(frozen=True)
class Posterior:
    """The logarithm of each point's cost (seconds of an image, or of a GPU for an image) as weighted draws and a normal rest."""

    value_SM: Array
    weights_S: Array
    rest_M: Array  # standard deviation that the draws do not show
    offset_M: Array  # cost − step, in logarithms
    residuals: Residuals
    disturbances: Disturbances
    rows_U: Rows  # of the points that ran
    cost_U: Array  # the logarithm of their cost, from their own measurements and the model together
    own_most_U: Array  # what it is at most by their own measurements alone, two standard deviations above their mean
    incumbent_M: Rows  # row of the measured point that each one has to beat
    penalty_M: Array  # what that one's cost counts more, in logarithms

    @property
    def best(self) -> int:
        """Row of the best measured point."""
        return int(self.rows_U[np.argmin(self.cost_U)])

    @property
    def amplitude(self) -> float:
        """Of what the model leaves unexplained, relative."""
        return self.residuals.amplitude

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
        """By how much each point is cheaper than its incumbent: draws (SM, relative), and the standard deviation of the rest."""
        rest_M = np.sqrt(self.rest_M**2 + self.rest_M[self.incumbent_M] ** 2) + 1e-9
        return self.value_SM[:, self.incumbent_M] + self.penalty_M - self.value_SM, rest_M

    def gain_M(self) -> Array:
        """Expected improvement on the incumbent, relative (Mockus 1978; Jones et al. 1998), over all draws."""
        ahead_SM, rest_M = self.ahead()
        scaled_SM = ahead_SM / rest_M
        density_SM = np.exp(-0.5 * scaled_SM**2) / math.sqrt(2 * math.pi)
        return np.asarray(self.weights_S @ (ahead_SM * ndtr(scaled_SM) + rest_M * density_SM))

    def beats_M(self, margin: float) -> Array:
        """Probability that a point beats its incumbent by more than `margin`, relative."""
        ahead_SM, rest_M = self.ahead()
        return np.asarray(self.weights_S @ ndtr((ahead_SM - math.log1p(margin)) / rest_M))

    def bound(self, among_M: Flags, chance_M: Array, doubt: float) -> float:
        """The least share by which no point of `among_M` runs and beats its incumbent with a probability above `doubt`, or 0.

        `chance_M`: that a point can run.
        """
        ahead_SM, rest_M = (part[..., among_M] for part in self.ahead())

        def doubted(log_margin: float) -> float:
            beats_M = self.weights_S @ ndtr((ahead_SM - log_margin) / rest_M)
            return float((chance_M[among_M] * beats_M).max(initial=0.0)) - doubt

        if doubted(0.0) <= 0:
            return 0.0
        return math.expm1(brentq(doubted, 0.0, float(np.max(ahead_SM)) + 9 * float(np.max(rest_M))))

    def leaders(self, count: int) -> Rows:
        """Rows of the best measured points, the best first."""
        return self.rows_U[np.argsort(self.cost_U, kind="stable")[:count]]

    def among(self, rows_C: Rows, rng: np.random.Generator, draws: int = 4000) -> Array:
        """Draws of the logarithm of the cost of measured points, what their residuals have in common included: draws × C."""
        spread_CC = self.residuals.covariance(rows_C) + 1e-10 * np.eye(len(rows_C))
        rest = rng.standard_normal((draws, len(rows_C))) @ np.linalg.cholesky(spread_CC).T
        away_SC = self.value_SM[:, rows_C] - self.value_M[rows_C]
        cost_C = self.cost_U[[int(np.flatnonzero(self.rows_U == row)[0]) for row in rows_C]]
        return np.asarray(cost_C + away_SC[rng.choice(len(self.weights_S), draws, p=self.weights_S)] + rest)


def posterior_of(
    prior: StepTime,
    model: StepTime,
    measured: Measured,
    *,
    rows: Sequence[int],
    ages: Sequence[int],
    pending: Sequence[int],
    layout: Layout,
    offset_M: Array,
    seed: Sequence[int],
    along_front: bool,
    lost_M: Flags,
) -> Posterior:
    """The posterior after `measured` at `rows` of `layout`, each `ages` probes ago; `model` is the prior fitted to them.

    Pending rows count as if each had brought what the model predicts (Ginsbourger et al. 2010, "kriging believer").
    A point's incumbent is the best measured one, or with `along_front` the one that keeps it off the front of speed and cost.
    What is `lost` cannot run any more and is nobody's incumbent, unless all that was measured is lost.
    """
    if pending:
        guess = step_times(model.mean_P, layout.take(pending))
        measured = measured.joined(np.log(np.stack([guess.step, guess.work, guess.forward])), layout.take([*rows, *pending]))
        model = prior.fitted(measured)
    at_O = np.array([*rows, *pending])
    age_O = np.array([*ages, *(0 for _ in pending)], dtype=float)
    fit = _Fit.of(prior, model, measured, layout, at_O, age_O)
    logs_SP, weights_S = fit.model.draws(prior, fit.measured, DRAWS, np.random.default_rng(seed))
    step_SM = np.log(step_times(logs_SP, layout).step)
    value_SM = step_SM + (fit.log_O - step_SM[:, at_O]) @ fit.residuals.gain_MO.T + offset_M
    rows_U = np.array(list(dict.fromkeys(rows)))
    cost_U = _costs(fit, measured, layout, rows_U, at_O, (weights_S @ value_SM)[rows_U], offset_M)
    mean_U, error_U = _own(rows_U, at_O, measured.logs_3M[0], measured.noise_M)
    own_most_U = mean_U + 2 * error_U + offset_M[rows_U]
    if not lost_M[rows_U].all():
        cost_U[lost_M[rows_U]] = own_most_U[lost_M[rows_U]] = np.inf
    incumbent_M, penalty_M = np.full(len(offset_M), np.argmin(cost_U)), np.zeros(len(offset_M))
    if along_front:
        incumbent_M, penalty_M = incumbents(layout.workers_M, layout.workers_M[rows_U], cost_U)
    return Posterior(
        value_SM=value_SM,
        weights_S=weights_S,
        rest_M=np.sqrt(fit.residuals.variance_M),
        offset_M=offset_M,
        residuals=fit.residuals,
        disturbances=fit.disturbances,
        rows_U=rows_U,
        cost_U=cost_U,
        own_most_U=own_most_U,
        incumbent_M=rows_U[incumbent_M],
        penalty_M=penalty_M,
    )


@dataclass(frozen=True)
class _Fit:
    """The model fitted to the measurements as they would be were nobody else there, and the cluster always the same."""

    model: StepTime
    measured: Measured
    residuals: Residuals
    log_O: Array  # of the steps, without what disturbed them
    disturbances: Disturbances
    change_O: Array  # what the cluster's state had added before anything was taken off

    @classmethod
    def of(cls, prior: StepTime, model: StepTime, measured: Measured, layout: Layout, at_O: Rows, age_O: Array) -> _Fit:
        """`model` is the prior fitted to `measured` as it is."""
        raw_O, workers_O = measured.logs_3M[0], layout.workers_M[at_O]
        residuals = _unexplained(prior, model, measured, raw_O, layout, at_O, age_O)
        change_O = residuals.change_O
        disturbances = Disturbances.of(at_O.tolist(), workers_O, raw_O, measured.noise_M)
        left = Disturbances.of(at_O.tolist(), workers_O, raw_O - change_O, measured.noise_M)
        measured = measured.without(left.excess_O, left.doubt_O)
        log_O = measured.logs_3M[0]
        if (left.excess_O + np.abs(change_O)).max() > CHANGED:
            # The model shall not explain by what a point is what happened at its time.
            measured = measured.without(change_O)
            model = prior.fitted(measured)
            residuals = _unexplained(prior, model, measured, log_O, layout, at_O, age_O)
        return cls(model, measured, residuals, log_O, disturbances, change_O)


def _costs(fit: _Fit, raw: Measured, layout: Layout, rows_U: Rows, at_O: Rows, value_U: Array, offset_M: Array) -> Array:
    """The cost of the points that ran, in logarithms: `value_U` is what model and residuals say of it."""
    noise_O = fit.measured.noise_M
    # A point that was measured slow is not the best, whatever the model says of it.
    mean_U, error_U = _own(rows_U, at_O, fit.log_O - fit.residuals.change_O, noise_O)
    cost_U = np.maximum(value_U, mean_U - 2 * error_U + offset_M[rows_U])
    log_O, workers_O = raw.logs_3M[0] + offset_M[at_O], layout.workers_M[at_O]
    return undisturbed(
        cost_U,
        fit.disturbances,
        rows_U=rows_U,
        rows_O=at_O,
        workers_O=workers_O,
        log_O=log_O,
        noise_O=noise_O,
        change_O=fit.change_O,
    )


def _own(rows_U: Rows, at_O: Rows, log_O: Array, noise_O: Array) -> tuple[Array, Array]:
    """The mean logarithm of the step by a point's own measurements, and its standard deviation."""
    weight_UO = np.equal.outer(rows_U, at_O) / (noise_O**2 + REPEAT_SD**2)
    return np.asarray(weight_UO @ log_O / weight_UO.sum(axis=1)), np.asarray(1 / np.sqrt(weight_UO.sum(axis=1)))


def _unexplained(
    prior: StepTime, model: StepTime, measured: Measured, log_O: Array, layout: Layout, at_O: Rows, age_O: Array
) -> Residuals:
    """What `model`, fitted to `measured`, leaves of the logarithms `log_O` as they were measured."""
    J_OP = model.jacobian(measured.layout)[0]
    step_O = np.log(step_times(model.mean_P, measured.layout).step)
    left_O, noise_O = measured.logs_3M[0] - step_O, measured.noise_M
    slow_O = np.where(left_O > SLOW * np.hypot(noise_O, MODEL_ERROR["step"]), left_O / 2, 0.0)
    explained_OO = J_OP @ prior.covariance_PP @ J_OP.T
    away_O = log_O - step_O + J_OP @ (model.mean_P - prior.mean_P)
    return Residuals.of(layout, at_O, age_O, away_O, np.maximum(noise_O, slow_O), explained_OO, left_O)
