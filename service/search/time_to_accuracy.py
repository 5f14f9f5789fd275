"""Which points to train to the target accuracy, one after the other, and how long each may take.

Bigger batches learn less from an image. Steps, and images, to an accuracy at a global batch of B:

    S(B) = S_min·(1 + B_noise/B) steps        E(B) = S_min·(B + B_noise) images

(McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.3). It holds for learning rates that are right
for their batch; where one rate serves all, or rises with the batch beyond what is stable, trainings show another B_noise than
the gradients do, which is why the measured one is a prior here and no more.

The first training is of the point that is predicted to be the fastest. Every training adds steps and a noise scale, and with
them the others are predicted again; one goes on only while it can still beat the fastest so far. Nothing here knows who trains.

Shapes: M points, O trainings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.special import ndtr

from service.config.space import GLOBAL_BATCH
from service.search.points import Array, Flags, Point

FORM = 1.0  # standard deviation of log(B_noise) around a measured B_simple: they agree to an order of magnitude
UNMEASURED = (500.0, 3.0)  # B_noise in images where nothing measured it, and the standard deviation of its logarithm
UNKNOWN = 8.0  # standard deviation of log(S_min) before a training
SEEDS = 0.12  # relative: what another seed changes about the steps that a training takes
MIN_FASTEST_PROBABILITY = 0.1  # below it a point is not worth a training; the bound is the interval of as much doubt
BOUND_DEVIATIONS = 1.2816  # of a normal, on one side, at 90%


@dataclass(frozen=True)
class Training:
    """One training towards the target: `steps` at the evaluation that reached it first, or, where none did, at the end."""

    global_batch: float
    steps: float
    every: float  # steps between evaluations
    reached: bool = True


class TimesToTarget(NamedTuple):
    """Medians of M points, and the standard deviation of their logarithms."""

    seconds_M: Array
    spread_M: Array


@dataclass(frozen=True)
class BatchScaling:
    """What is known of S_min and B_noise: their logarithms are normal together."""

    mean_2: Array
    covariance_22: Array

    @classmethod
    def of(cls, noise_scales: Sequence[float] = (), trainings: Sequence[Training] = ()) -> BatchScaling:
        """Fit to noise scales (images) that trainings have measured, and to trainings to the target.

        Maximum a posteriori and its curvature. A training is known to half of what lies between two evaluations; one that
        never reached the target only says that it takes longer.
        """
        median, spread = (math.exp(float(np.log(noise_scales).mean())), FORM) if noise_scales else UNMEASURED
        batch_O, end_O, every_O = np.array([(t.global_batch, t.steps, t.every) for t in trainings]).reshape(-1, 3).T
        reached_O = np.array([t.reached for t in trainings], dtype=bool)
        # Somewhere in the last `every` steps: their middle, and the deviation of a uniform distribution over them.
        steps_O = np.where(reached_O, np.maximum(end_O - every_O / 2, every_O / 2), end_O)
        error_O = np.hypot(SEEDS, np.where(reached_O, every_O, 0.0) / math.sqrt(12) / steps_O)
        begin = np.log([np.median(steps_O[reached_O] if reached_O.any() else steps_O) if trainings else 1.0, median])

        def off(logs_2: Array) -> Array:
            behind_O = (np.log(steps_O) - _log_steps(logs_2, batch_O)) / error_O
            penalty = np.where(reached_O, behind_O, np.maximum(behind_O, 0.0))
            return np.concatenate([penalty, (logs_2 - begin) / np.array([UNKNOWN, spread])])

        found = least_squares(off, begin)
        return cls(found.x, np.linalg.inv(found.jac.T @ found.jac))

    @property
    def s_min(self) -> float:
        """Steps to the target at an infinite batch."""
        return float(np.exp(self.mean_2[0]))

    @property
    def b_noise(self) -> float:
        """Images: at this batch the target takes twice S_min steps, and twice the fewest images."""
        return float(np.exp(self.mean_2[1]))

    def steps_M(self, global_batch_M: Array) -> Array:
        """Steps to the target; without a training behind it only their quotients mean something."""
        return np.exp(_log_steps(self.mean_2, global_batch_M))

    def factor(self, point: Point) -> float:
        """What a point's seconds for an image are multiplied by in a search for time: images to the target."""
        batch = float(point[GLOBAL_BATCH])
        return float(self.steps_M(np.array([batch]))[0] * batch)

    def time_to_accuracy(
        self, global_batch_M: Array, step_s_M: Array, step_spread_M: Array | float = 0.0, every_M: Array | float = 0.0
    ) -> TimesToTarget:
        """Seconds to the target, the wait for the next of the evaluations included that lie `every_M` steps apart.

        `step_s_M`: seconds of a step, measured or predicted, with the standard deviation of their logarithms.
        """
        steps_M = self.steps_M(global_batch_M)
        paid_M = steps_M + np.asarray(every_M) / 2
        share_M = self.b_noise / (global_batch_M + self.b_noise)  # derivative of `_log_steps` by the second logarithm
        J_M2 = np.stack([np.ones_like(share_M), share_M], axis=1) * (steps_M / paid_M)[:, None]
        spread_M = np.sqrt(np.einsum("mi,ij,mj->m", J_M2, self.covariance_22, J_M2))
        return TimesToTarget(paid_M * step_s_M, np.hypot(spread_M, np.asarray(step_spread_M)))


def _log_steps(logs_2: Array, global_batch_M: Array) -> Array:
    return np.asarray(logs_2[0] + np.log1p(np.exp(logs_2[1]) / global_batch_M))


@dataclass
class TimeToAccuracySearch:
    """Proposes points to train (`ask`) and takes up their trainings (`tell`); the same trainings give the same next point."""

    global_batch_M: Array
    step_s_M: Array  # from probes or from a model of them
    every_M: Array  # steps between evaluations
    step_spread_M: Array | float = 0.05  # standard deviation of the logarithms of `step_s_M`
    tolerance: float = 0.025
    max_trainings: int = 4
    noise_scales: Sequence[float] = ()  # in images, of trainings before these, such as the teacher's
    summaries: dict[int, Mapping[str, float]] = field(default_factory=dict)  # by row; empty where a training failed
    _why: str = "nothing was trained yet"

    def tell(self, row: int, summary: Mapping[str, float]) -> None:
        """Take up a training: `steps`, `train_s`, and where known `noise_scale`, `steps_to_accuracy`, `time_to_accuracy_s`."""
        self.summaries[row] = summary

    @property
    def best(self) -> int | None:
        """The row that reached the target in the least time; None where none did."""
        times = {row: one["time_to_accuracy_s"] for row, one in self.summaries.items() if "time_to_accuracy_s" in one}
        return min(times, key=lambda row: times[row]) if times else None

    @property
    def until_s(self) -> float | None:
        """How long the next training may take: it is of no use once it is slower than the best."""
        return None if self.best is None else float(self.summaries[self.best]["time_to_accuracy_s"])

    def scaling(self) -> BatchScaling:
        """What the trainings so far say of steps by batch."""
        ran = {row: one for row, one in self.summaries.items() if one.get("steps")}
        trainings = [
            Training(
                float(self.global_batch_M[row]),
                one.get("steps_to_accuracy", one["steps"]),
                float(self.every_M[row]),
                reached="steps_to_accuracy" in one,
            )
            for row, one in ran.items()
        ]
        own = [one["noise_scale"] for one in ran.values() if one.get("noise_scale", 0.0) > 0]
        return BatchScaling.of(own or self.noise_scales, trainings)

    def predict(self) -> TimesToTarget:
        """Seconds to the target of every point."""
        # Without a training S_min is unknown, and how much the wait for an evaluation adds to it.
        every_M = self.every_M if self.summaries else np.zeros_like(self.every_M)
        return self.scaling().time_to_accuracy(self.global_batch_M, self.step_s_M, self.step_spread_M, every_M)

    def _left_M(self) -> Flags:
        return ~np.isin(np.arange(len(self.global_batch_M)), list(self.summaries))

    def bound(self) -> float:
        """With a probability of 90% each, no untrained point is faster than the best by more than this share."""
        left_M = self._left_M()
        if not left_M.any() and self.summaries:
            return 0.0
        if self.until_s is None:
            return math.inf
        prediction = self.predict()
        fastest_M = prediction.seconds_M * np.exp(-BOUND_DEVIATIONS * np.hypot(prediction.spread_M, SEEDS))
        return max(0.0, float(self.until_s / np.min(fastest_M[left_M])) - 1)

    def ask(self) -> int | None:
        """The row to train next; None where the search is over."""
        count, left_M, until_s = len(self.summaries), self._left_M(), self.until_s
        if count >= min(self.max_trainings, len(left_M)):
            reached = "" if self.best is not None else ", and none reached the target"
            self._why = f"{count} points were trained, which is {'the maximum' if left_M.any() else 'all'}{reached}"
            return None
        prediction = self.predict()
        if until_s is None:
            tried = f"none of {count} reached the target, and of the others " if count else ""
            self._why = f"{tried}it is predicted to be the fastest"
            return int(np.argmin(np.where(left_M, prediction.seconds_M, np.inf)))
        ahead_M = math.log(until_s) - np.log(prediction.seconds_M) - math.log1p(self.tolerance)
        chance_M = np.where(left_M, ndtr(ahead_M / np.hypot(prediction.spread_M, SEEDS)), 0.0)
        row = int(np.argmax(chance_M))
        if chance_M[row] < MIN_FASTEST_PROBABILITY:
            self._why = (
                f"no other point is predicted to reach the target more than {self.tolerance:.1%} sooner; "
                f"the likeliest with a probability of {chance_M[row]:.0%}"
            )
            return None
        self._why = (
            f"it is predicted to reach the target in {prediction.seconds_M[row]:.3g} s, sooner than the best so far with a "
            f"probability of {chance_M[row]:.0%}"
        )
        return row

    def why(self) -> str:
        """Why the last answer of `ask` was given, in a sentence."""
        return self._why
