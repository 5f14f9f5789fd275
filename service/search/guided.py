"""Which point of a sweep to probe next, so that the best one is found for little GPU time.

A few probes where the step-time model learns most, then those with the best expected gain a GPU-second, until nothing is
believed to beat the best by more than the tolerance. Nothing here knows who runs a probe.

Shapes: M points, O observations, S draws of the parameters, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from service.search.memory_model import MemoryModel
from service.search.points import (
    GLOBAL_BATCH,
    LOADER_WORKERS,
    NUM_WORKERS,
    Array,
    Hardware,
    Observation,
    Point,
    categories,
    identity,
)
from service.search.probes import SlowSteps
from service.search.residuals import DRIFT, Residuals
from service.search.step_time import MODEL_ERROR, Measured, StepTime, times

__all__ = ["Guided", "Hardware", "Observation", "Point"]

Flags = NDArray[np.bool_]
METRICS = {"images_per_s": 0, "epoch_s": 0, "gpu_s_per_epoch": 1}  # power of num_workers in what one image costs
FIRST_PROBES = 4  # by optimal design, before gains are compared
DRAWS = 192
DOUBT = 0.05  # a point stays worth a probe while it beats the best by more than the tolerance with this probability
PRICE = 0.3  # expected gain that a probe as dear as the whole grid would need: 0.1% for 1/300 of the grid
GRID_STEPS = 250  # of a point of the grid, to compare with
KNOWN, FLOOR_STEPS = 0.03, 8  # a probe ends when the mean is known to 3% (95% of the time), but not before these steps
WARM_UP_STEPS = 10  # that every probe pays for and does not count


@dataclass(frozen=True)
class Belief:
    """What is believed of all points after the probes so far, as logarithms of the cost of an image."""

    best: int  # row of the best measured point
    gain_M: Array  # expected gain over the best, relative
    beats_M: Array  # probability of beating the best by more than the tolerance
    step_s_M: Array
    spread_M: Array  # standard deviation of the step time, relative


class Guided:
    """Asked for points, told what they brought; the same tells in the same order give the same next point."""

    def __init__(
        self,
        points: Sequence[Point],
        hardware: Hardware,
        *,
        metric: str = "images_per_s",
        tolerance: float = 0.03,
        seed: int = 0,
        max_steps: int = 60,
        start_s: float = 25.0,
    ) -> None:
        """`max_steps` bounds one probe; `start_s` is what a new group of workers takes before its first step.

        Raises:
            ValueError: no points, or a metric that is none of `METRICS`.
            KeyError: a point without scale.num_workers, data.global_batch_size or data.loader_workers.
        """
        if not points:
            raise ValueError("a search needs at least one point")
        if metric not in METRICS:
            raise ValueError(f"metric {metric} cannot be searched for: write one of {', '.join(METRICS)}")
        self.tolerance, self.seed, self.max_steps, self.start_s = tolerance, seed, max_steps, start_s
        self.points = list({identity(point): point for point in points}.values())
        self.row = {identity(point): row for row, point in enumerate(self.points)}
        self.prior = StepTime.prior(hardware, categories(self.points))
        self.layout = self.prior.layout(self.points)
        kinds = {tuple(column): 0 for column in self.layout.member_KM.T}
        places = {kind: place for place, kind in enumerate(kinds)}
        self.kind_M = np.array([places[tuple(column)] for column in self.layout.member_KM.T])
        batches_M = np.array([float(point[GLOBAL_BATCH]) for point in self.points])
        self.offset_M = METRICS[metric] * np.log(self.layout.workers_M) - np.log(batches_M)
        self.memory = MemoryModel()
        self.told: list[tuple[int, Observation]] = []
        self.pending: list[int] = []
        self.model = self.prior
        self.slow = SlowSteps()
        self.amplitude = 0.0  # of what the model leaves unexplained, relative
        self.group: float | None = None  # num_workers of the probe before
        self._why = "nothing was measured yet"

    def tell(self, point: Point, seen: Observation) -> None:
        """Take up what a point brought, in any order, asked for or not.

        Raises:
            KeyError: the point is none of the sweep's.
        """
        row = self.row[identity(point)]
        if row in self.pending:
            self.pending.remove(row)
        if seen.status == "ok" and not len(seen.steps_s):
            seen = Observation("failed")
        self.told.append((row, seen))
        self.group = self.layout.workers_M[row]
        if seen.status in ("ok", "oom"):
            batch = float(self.layout.batch_M[row])
            self.memory.tell(int(self.kind_M[row]), batch, seen.peak_memory_mib, seen.gpu_memory_mib, seen.status == "oom")
        ok = self._ok()
        if seen.status == "ok":
            self.model = self.prior.fitted(self._measured(ok))
            self.slow = SlowSteps.of([one.steps_s for _, one in ok])

    def ask(self) -> Point | None:
        """The next point to probe; None when no further probe is worth it, or none is left."""
        candidates = self._candidates()
        if not candidates.any():
            self._why = "every point that can run was measured"
            return None
        if len(self._ok()) + len(self.pending) < FIRST_PROBES or not self._ok():
            row = self._informative(candidates)
            self._why = f"{self._name(row)} tells most about the step's parameters for its GPU time"
        else:
            belief = self._belief()
            cost_M = self._cost(belief.step_s_M)
            room = self._fits()
            whole = float((self.layout.workers_M * (self.start_s + GRID_STEPS * belief.step_s_M))[room].sum())
            worth = candidates & ((belief.beats_M > DOUBT) | (belief.gain_M > PRICE * cost_M / whole))
            best = self._name(belief.best)
            if not worth.any():
                chance = float(belief.beats_M[candidates].max())
                self._why = (
                    f"no untested point is believed to be more than {self.tolerance:.0%} better than {best} "
                    f"(the likeliest with a probability of {chance:.1%})"
                )
                return None
            row = int(np.argmax(np.where(worth, belief.gain_M / cost_M, -1.0)))
            self._why = (
                f"{self._name(row)} beats {best} by more than {self.tolerance:.0%} with a probability of {belief.beats_M[row]:.0%}"
            )
        self.pending.append(row)
        self.group = self.layout.workers_M[row]
        return self.points[row]

    def enough(self, steps_s: Sequence[float]) -> bool:
        """Whether a probe's mean step time is known to 3%, or the probe has had its steps."""
        count = len(steps_s)
        return count >= self.max_steps or (count >= FLOOR_STEPS and 1.96 * self.slow.mean(steps_s).error <= KNOWN)

    def best(self) -> Point | None:
        """The best measured point, its neighbours' and the model's word taken into account; None where nothing ran."""
        return self.points[self._belief().best] if self._ok() else None

    def why(self) -> str:
        """Why the last answer of `ask` was given, in a sentence."""
        return self._why

    def _ok(self) -> list[tuple[int, Observation]]:
        return [(row, seen) for row, seen in self.told if seen.status == "ok"]

    def _measured(self, pairs: Sequence[tuple[int, Observation]]) -> Measured:
        return Measured.of(self.layout.take([row for row, _ in pairs]), [seen for _, seen in pairs])

    def _name(self, row: int) -> str:
        point = self.points[row]
        axes = {NUM_WORKERS: "workers", GLOBAL_BATCH: "global batch", LOADER_WORKERS: "loader workers"}
        named = [f"{point[key]} {label}" if key != GLOBAL_BATCH else f"{label} {point[key]}" for key, label in axes.items()]
        return ", ".join([*named, *(f"{key} {value}" for key, value in point.items() if key not in axes)])

    def _candidates(self) -> Flags:
        """Neither told nor pending, in memory, and without a value that only ever failed."""
        open_M = np.ones(len(self.points), dtype=bool)
        open_M[[row for row, _ in self.told] + self.pending] = False
        open_M &= self._fits()
        worked = np.zeros(len(self.points), dtype=bool)
        worked[[row for row, seen in self.told if seen.status in ("ok", "oom")]] = True
        broke = np.zeros(len(self.points), dtype=int)
        for row, seen in self.told:
            broke[row] += seen.status in ("failed", "infeasible")
        for member_M in [*self.layout.member_KM.astype(bool), *(~self.layout.member_KM.astype(bool))]:
            if broke[member_M].sum() >= 2 and not worked[member_M].any():
                open_M &= ~member_M
        for workers in np.unique(self.layout.workers_M):  # a cluster that shrank holds no more than that either
            if broke[self.layout.workers_M == workers].sum() >= 2 and not worked[self.layout.workers_M >= workers].any():
                open_M &= self.layout.workers_M < workers
        return open_M

    def _fits(self) -> Flags:
        return self.memory.fits(self.kind_M, self.layout.batch_M)

    def _cost(self, step_s_M: Array) -> Array:
        """GPU-seconds of a probe of each point."""
        lengths = [len(seen.steps_s) for _, seen in self._ok()] or [20]
        steps = WARM_UP_STEPS + float(np.median(lengths))
        start_M = np.where(self.layout.workers_M == self.group, 0.0, self.start_s)
        return self.layout.workers_M * (start_M + steps * step_s_M)

    def _informative(self, candidates: Flags) -> int:
        """The candidate that shrinks the parameters' uncertainty most for its cost (D-optimal: Chaloner and Verdinelli 1995).

        The gain of one observation is log det(I + J Σ Jᵀ / error²), J being its derivatives by the parameters.
        """
        errors = np.array(list(MODEL_ERROR.values()))
        J_M3P = np.moveaxis(self.model.jacobian(self.layout), 0, 1) / errors[:, None]
        covariance_PP = self.model.covariance_PP
        for row in self.pending:  # as if they had been measured
            J_3P = J_M3P[row]
            lift = covariance_PP @ J_3P.T
            covariance_PP = covariance_PP - lift @ np.linalg.solve(np.eye(3) + J_3P @ lift, lift.T)
        inner = J_M3P @ covariance_PP @ np.swapaxes(J_M3P, 1, 2)
        gain_M = np.linalg.slogdet(np.eye(3) + inner)[1]
        if self.memory.capacity_mib == np.inf:  # nothing known of memory: begin in the lower half of the batches
            low = self.layout.batch_M <= np.median(self.layout.batch_M[candidates])
            candidates = candidates & low
        elif self.memory.is_line_unknown():  # no bigger batch is tried before two peaks give the line
            known = [(kind, batch) for kind, peaks in self.memory.seen.items() for batch in peaks]
            other = np.zeros_like(candidates)
            for kind, batch in known:
                other |= (self.kind_M == kind) & (self.layout.batch_M != batch)
            candidates = candidates & other if (candidates & other).any() else candidates
        cost_M = self._cost(times(self.model.mean_P, self.layout).step)
        return int(np.argmax(np.where(candidates, gain_M / np.sqrt(cost_M), -1.0)))

    def _belief(self) -> Belief:
        """Model and residuals together, drawn from the parameters that the observations leave possible."""
        pairs = self._ok()
        measured, model = self._measured(pairs), self.model
        rows = np.array([row for row, _ in pairs] + self.pending)
        log_O, noise_O = measured.logs_3M[0], measured.noise_M
        if self.pending:  # believed: as if each had brought what the model says
            guess = times(model.mean_P, self.layout.take(self.pending))
            parts = np.log(np.stack([guess.step, guess.work, guess.forward]))
            log_O = np.concatenate([log_O, parts[0]])
            noise_O = np.concatenate([noise_O, np.full(len(self.pending), KNOWN / 2)])
            errors = np.array(list(MODEL_ERROR.values()))[:, None] * np.ones(len(self.pending))
            measured = Measured(
                self.layout.take(rows.tolist()),
                np.concatenate([measured.logs_3M, parts], axis=1),
                np.concatenate([measured.errors_3M, errors], axis=1),
                noise_O,
            )
            model = self.prior.fitted(measured)
        order = {id(seen): place for place, (_, seen) in enumerate(self.told)}
        age_O = np.array([len(self.told) - order[id(seen)] for _, seen in pairs] + [0] * len(self.pending), dtype=float)

        J_OP = model.jacobian(measured.layout)[0]
        residual_O = log_O - np.log(times(model.mean_P, measured.layout).step)
        slow_O = np.where(residual_O > 5 * np.hypot(noise_O, MODEL_ERROR["step"]), residual_O / 2, 0.0)  # maybe an outlier
        explained_OO = J_OP @ self.prior.covariance_PP @ J_OP.T
        away_O = residual_O + J_OP @ (model.mean_P - self.prior.mean_P)
        rest = Residuals.of(self.layout, rows, age_O, away_O, np.maximum(noise_O, slow_O), explained_OO)
        self.amplitude = rest.amplitude

        rng = np.random.default_rng([self.seed, len(self.told), len(self.pending)])
        logs_SP, weights_S = model.draws(self.prior, measured, DRAWS, rng)
        step_SM = np.log(times(logs_SP, self.layout).step)
        step_SM = step_SM + (log_O - step_SM[:, rows]) @ rest.gain_MO.T
        value_SM = step_SM + self.offset_M
        mean_M = weights_S @ value_SM
        score_O = np.maximum(mean_M[rows], log_O - 2 * noise_O + self.offset_M[rows])[: len(pairs)]
        best = int(rows[int(np.argmin(score_O))])
        ahead_SM = value_SM[:, [best]] - value_SM
        spread_M = np.sqrt(rest.variance_M + rest.variance_M[best] + DRIFT**2)
        scaled_SM = ahead_SM / spread_M
        density_SM = np.exp(-0.5 * scaled_SM**2) / math.sqrt(2 * math.pi)
        gain_M = weights_S @ (ahead_SM * ndtr(scaled_SM) + spread_M * density_SM)
        beats_M = weights_S @ ndtr((ahead_SM - math.log1p(self.tolerance)) / spread_M)
        step_M = weights_S @ step_SM
        total_M = np.sqrt(weights_S @ (step_SM - step_M) ** 2 + rest.variance_M)
        return Belief(best, gain_M, beats_M, np.exp(step_M), total_M)
