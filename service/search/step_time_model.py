"""The step-time model: parameters with what is believed of them, fitted to measured steps, and what they predict.

The formulas are in `formulas`. Shapes: ... any leading axes, M points, P parameters, R residuals, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from service.search.fit_data import MODEL_ERROR, Measured
from service.search.formulas import INDEX, PARAMETERS, Times, step_times
from service.search.points import Array, Category, Hardware, Layout, Observation, Point, categories

EXTRA_SPREAD = 0.5  # of the two multipliers (decode speed, GPU speed) that each further value of an extra key gets
NUDGE = 1e-5  # of a parameter for its difference, in standard deviations of the prior
POOR = 0.5  # mean squared residual above which another start is tried
ROBUST = 2.0  # residuals beyond so many standard deviations count linearly, not squared


@dataclass(frozen=True)
class StepTime:
    """The model with what is believed of its parameters: normal in the logarithms."""

    hardware: Hardware
    extras: tuple[Category, ...]
    mean_P: Array
    covariance_PP: Array

    @classmethod
    def prior(cls, hardware: Hardware, extras: tuple[Category, ...] = ()) -> StepTime:
        """What is believed before anything is measured."""
        more = [0.0] * (2 * len(extras))
        mean_P = np.array([math.log(p.median) for p in PARAMETERS] + more)
        spread_P = np.array([p.spread for p in PARAMETERS] + [EXTRA_SPREAD for _ in more])
        return cls(hardware, extras, mean_P, np.diag(spread_P**2))

    @property
    def values(self) -> dict[str, float]:
        """Each parameter in its unit."""
        return {p.name: float(np.exp(self.mean_P[index])) for index, p in enumerate(PARAMETERS)}

    def layout(self, points: Sequence[Point]) -> Layout:
        """The points as this model reads them."""
        return Layout.of(points, self.hardware, self.extras)

    def fitted(self, measured: Measured) -> StepTime:
        """The parameters that explain the observations best, self being the prior.

        Robust least squares on relative residuals (`scipy.optimize.least_squares`, soft L1), the prior as further residuals;
        uncertainty by Laplace's approximation: the inverse of JᵀJ at the solution.
        """
        spread_P = np.sqrt(np.diag(self.covariance_PP))
        nudges = np.eye(len(spread_P)) * NUDGE

        def residuals(steps: Array) -> Array:  # ...P in prior standard deviations → ...R
            return np.concatenate([measured.residuals(self.mean_P + spread_P * steps), steps], axis=-1)

        def jacobian(steps: Array) -> Array:  # every parameter's difference in one call of the model
            moved = residuals(np.concatenate([steps + nudges, steps[None]]))
            return np.asarray((moved[:-1] - moved[-1]).T / NUDGE)

        def solved(start: Array) -> Any:
            return least_squares(residuals, start, jacobian, loss="soft_l1", f_scale=ROBUST, max_nfev=30, xtol=1e-3, ftol=1e-4)

        start = np.zeros_like(self.mean_P)
        found = solved(start)
        if found.cost > POOR * 0.5 * np.isfinite(measured.logs_3M).sum():
            # An all-reduce that hides in the prior's backward has no slope: a second start has it out in the open.
            start[[INDEX["reduce_node_s"], INDEX["reduce_net_s"]]] = 2.0
            start[INDEX["sharing"]] = 1.0
            found = min(found, solved(start), key=lambda one: float(one.cost))
        covariance = np.linalg.inv(found.jac.T @ found.jac + 1e-9 * np.eye(len(found.x)))
        return replace(self, mean_P=self.mean_P + spread_P * found.x, covariance_PP=spread_P[:, None] * covariance * spread_P)

    def draws(self, prior: StepTime, measured: Measured, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Parameters as the observations leave them possible (SP), and the weight of each draw (S).

        Laplace's normal knows nothing of corners: a disk that never was the limit so far may be ten times as fast but not
        half as fast. Importance weights bring that back, each at most √S times the mean (Ionides 2008).
        """
        unit_SP = rng.standard_normal((count, len(self.mean_P)))
        unit_SP[0] = 0
        logs_SP = self.mean_P + unit_SP @ np.linalg.cholesky(self.covariance_PP).T
        away_SP = (logs_SP - prior.mean_P) / np.sqrt(np.diag(prior.covariance_PP))
        squares = (np.concatenate([measured.residuals(logs_SP), away_SP], axis=-1) / ROBUST) ** 2
        energy_S = ROBUST**2 * (np.sqrt(1 + squares) - 1).sum(axis=-1)  # soft L1, as in the fit
        weights_S = 0.5 * (unit_SP**2).sum(axis=-1) - energy_S
        weights_S = np.exp(weights_S - np.max(weights_S))
        weights_S = np.minimum(weights_S, weights_S.mean() * math.sqrt(count))
        return logs_SP, weights_S / weights_S.sum()

    def jacobian(self, layout: Layout) -> Array:
        """How the logarithms of step, work and forward of each point move with the parameters: 3MP."""
        nudge = 1e-4
        moves = np.eye(len(self.mean_P)) * nudge
        both = step_times(np.concatenate([self.mean_P + moves, self.mean_P - moves]), layout)
        logs = np.log(np.stack([both.step, both.work, both.forward], axis=1))  # 2P, 3, M
        count = len(self.mean_P)
        return np.asarray(np.moveaxis((logs[:count] - logs[count:]) / (2 * nudge), 0, -1))

    def information(self, layout: Layout, pending: Sequence[int]) -> Array:
        """By how much a probe of each point shrinks the parameters' uncertainty (D-optimal: Chaloner and Verdinelli 1995): M.

        The gain of one observation is log det(I + J Σ Jᵀ / error²), J being its derivatives by the parameters. Pending rows
        count as if they had been measured.
        """
        J_M3P = np.moveaxis(self.jacobian(layout), 0, 1) / np.array(list(MODEL_ERROR.values()))[:, None]
        covariance_PP = self.covariance_PP
        for row in pending:
            lift_P3 = covariance_PP @ J_M3P[row].T
            covariance_PP = covariance_PP - lift_P3 @ np.linalg.solve(np.eye(3) + J_M3P[row] @ lift_P3, lift_P3.T)
        return np.asarray(np.linalg.slogdet(np.eye(3) + J_M3P @ covariance_PP @ np.swapaxes(J_M3P, 1, 2))[1])

    def predict(self, points: Sequence[Point]) -> Prediction:
        """Seconds of a step, with the standard deviation that the parameters' uncertainty gives, and each part apart."""
        layout = self.layout(points)
        J_MP = self.jacobian(layout)[0]
        mean = step_times(self.mean_P, layout)
        relative_M = np.sqrt(np.einsum("mp,pq,mq->m", J_MP, self.covariance_PP, J_MP))
        return Prediction(mean.step, mean.step * relative_M, mean)


@dataclass(frozen=True)
class Prediction:
    """Of M points."""

    step_s: Array
    step_sd_s: Array
    times: Times


def fit_step_times(points: Sequence[Point], observations: Sequence[Observation], hardware: Hardware) -> StepTime:
    """The model fitted to the observations that are `ok`; to none: the prior.

    Raises:
        KeyError: a point without one of the three axes of every sweep.
    """
    prior = StepTime.prior(hardware, categories(points))
    pairs = [
        (p, observation)
        for p, observation in zip(points, observations, strict=True)
        if observation.status == "ok" and len(observation.steps_s)
    ]
    if not pairs:
        return prior
    return prior.fitted(Measured.of(prior.layout([p for p, _ in pairs]), [observation for _, observation in pairs]))
