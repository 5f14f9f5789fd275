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

import numpy as np
from scipy.optimize import least_squares

from service.config.space import GLOBAL_BATCH
from service.search.points import Array, Point

FORM = 1.0  # standard deviation of log(B_noise) around a measured B_simple: they agree to an order of magnitude
UNMEASURED = (500.0, 3.0)  # B_noise in images where nothing measured it, and the standard deviation of its logarithm
UNKNOWN = 8.0  # standard deviation of log(S_min) before a training
SEEDS = 0.12  # relative: what another seed changes about the steps that a training takes
MARGIN = 0.3  # a point is worth a training while it is predicted to take at most this share longer than the best one took


@dataclass(frozen=True)
class Training:
    """One training towards the target: `steps` at the evaluation that reached it first, or, where none did, at the end."""

    global_batch: float
    steps: float
    every: float  # steps between evaluations
    reached: bool = True


@dataclass(frozen=True)
class BatchScaling:
    """What is known of S_min and B_noise."""

    s_min: float
    """Steps to the target at an infinite batch."""
    b_noise: float
    """Images: at this batch the target takes twice S_min steps, and twice the fewest images."""

    @classmethod
    def of(cls, noise_scales: Sequence[float] = (), trainings: Sequence[Training] = ()) -> BatchScaling:
        """Fit to noise scales (images) that trainings have measured, and to trainings to the target.

        Maximum a posteriori. A training is known to half of what lies between two evaluations; one that never reached the target
        only says that it takes longer.
        """
        median, spread = (math.exp(float(np.log(noise_scales).mean())), FORM) if noise_scales else UNMEASURED
        batch_O, end_O, every_O = np.array([(t.global_batch, t.steps, t.every) for t in trainings]).reshape(-1, 3).T
        reached_O = np.array([t.reached for t in trainings], dtype=bool)
        # Somewhere in the last `every` steps: their middle, and the deviation of a uniform distribution over them.
        steps_O = np.where(reached_O, np.maximum(end_O - every_O / 2, every_O / 2), end_O)
        error_O = np.hypot(SEEDS, np.where(reached_O, every_O, 0.0) / math.sqrt(12) / steps_O)
        begin = np.log([np.median(steps_O[reached_O] if reached_O.any() else steps_O) if trainings else 1.0, median])

        def off(logs_2: Array) -> Array:
            log_steps_O = logs_2[0] + np.log1p(np.exp(logs_2[1]) / batch_O)
            behind_O = (np.log(steps_O) - log_steps_O) / error_O
            penalty = np.where(reached_O, behind_O, np.maximum(behind_O, 0.0))
            return np.concatenate([penalty, (logs_2 - begin) / np.array([UNKNOWN, spread])])

        return cls(*np.exp(least_squares(off, begin).x).tolist())

    def steps_M(self, global_batch_M: Array) -> Array:
        """Steps to the target; without a training behind it only their quotients mean something."""
        return np.asarray(self.s_min * (1 + self.b_noise / global_batch_M))

    def factor(self, point: Point) -> float:
        """What a point's seconds for an image are multiplied by in a search for time: images to the target."""
        batch = float(point[GLOBAL_BATCH])
        return self.s_min * (batch + self.b_noise)


@dataclass
class TimeToAccuracySearch:
    """Proposes points to train (`ask`) and takes up their trainings (`tell`); the same trainings give the same next point."""

    global_batch_M: Array
    step_s_M: Array  # from probes or from a model of them
    every_M: Array  # steps between evaluations
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

    def predict(self) -> Array:
        """Seconds to the target of every point, the wait for the next evaluation included."""
        # Without a training S_min is unknown, and how much the wait for an evaluation adds to it.
        wait_M = self.every_M / 2 if self.summaries else np.zeros_like(self.every_M)
        return np.asarray((self.scaling().steps_M(self.global_batch_M) + wait_M) * self.step_s_M)

    def ask(self) -> int | None:
        """The row to train next; None where the search is over."""
        count, until_s = len(self.summaries), self.until_s
        left_M = ~np.isin(np.arange(len(self.global_batch_M)), list(self.summaries))
        if count >= min(self.max_trainings, len(left_M)):
            reached = "" if self.best is not None else ", and none reached the target"
            self._why = f"{count} points were trained, which is {'the maximum' if left_M.any() else 'all'}{reached}"
            return None
        seconds_M = np.where(left_M, self.predict(), np.inf)
        row = int(np.argmin(seconds_M))
        if until_s is None:
            tried = f"none of {count} reached the target, and of the others " if count else ""
            self._why = f"{tried}it is predicted to be the fastest"
            return row
        predicted = f"is predicted to reach the target in {seconds_M[row]:.3g} s, the best so far took {until_s:.3g} s"
        if seconds_M[row] > (1 + MARGIN) * until_s:
            self._why = f"no other point comes near: the fastest of them {predicted}"
            return None
        self._why = f"it {predicted}"
        return row

    def why(self) -> str:
        """Why the last answer of `ask` was given, in a sentence."""
        return self._why
