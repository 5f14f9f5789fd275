"""Which points to train to the target accuracy, one after the other, and how long each may take.

The first is the one that is predicted to be the fastest. Every training tells steps and noise scale, and with them the others
are predicted anew; one goes on only while it can still beat the fastest so far. It ends when no point is likely to. Nothing here
knows who trains a point.

Shapes: M points.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtr

from service.search.accuracy import SEEDS, Learning, TimesToTarget, Training
from service.search.points import Array

MIN_FASTEST_PROBABILITY = 0.1  # below it a point is not worth a training


@dataclass
class TimeToAccuracySearch:
    """Proposes points to train (`ask`) and takes up their trainings (`tell`); the same trainings give the same next point."""

    global_batch_M: Array
    step_s_M: Array
    """Seconds of a step, from probes or from a model of them."""
    every_M: Array
    """Steps between evaluations."""
    step_spread_M: Array | float = 0.05
    """Standard deviation of the logarithms of `step_s_M`."""
    tolerance: float = 0.03
    most: int = 4
    """Trainings in all."""
    noise_scales: Sequence[float] = ()
    """In images, of trainings before these, such as the teacher's."""
    summaries: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Row → the summary of its training; empty where it failed."""
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

    def learning(self) -> Learning:
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
        return Learning.of(own or self.noise_scales, trainings)

    def predict(self) -> TimesToTarget:
        """Seconds to the target of every point."""
        # Without a training S_min is unknown, and how much the wait for an evaluation adds to it.
        every_M = self.every_M if self.summaries else np.zeros_like(self.every_M)
        return self.learning().time_to_accuracy(self.global_batch_M, self.step_s_M, self.step_spread_M, every_M)

    def chances_M(self) -> Array:
        """Probability that a point beats the best so far by more than the tolerance; 0 for those that were trained.

        While none has reached the target, 1 for the one that is predicted to be the fastest of those left.
        """
        prediction = self.predict()
        left_M = ~np.isin(np.arange(len(prediction.seconds_M)), list(self.summaries))
        if (until_s := self.until_s) is None:
            seconds_M = np.where(left_M, prediction.seconds_M, np.inf)
            return np.where(left_M & (seconds_M == seconds_M.min()), 1.0, 0.0)
        ahead_M = math.log(until_s) - np.log(prediction.seconds_M) - math.log1p(self.tolerance)
        return np.where(left_M, ndtr(ahead_M / np.hypot(prediction.spread_M, SEEDS)), 0.0)

    def bound(self) -> float:
        """No untrained point is believed to be faster than the best by more than this share, each with a probability of 95%."""
        left_M = ~np.isin(np.arange(len(self.global_batch_M)), list(self.summaries))
        if self.until_s is None or not left_M.any():
            return 0.0 if self.summaries and not left_M.any() else math.inf
        prediction = self.predict()
        least_M = prediction.seconds_M * np.exp(-1.645 * np.hypot(prediction.spread_M, SEEDS))
        return max(0.0, float(self.until_s / np.min(least_M[left_M])) - 1)

    def ask(self) -> int | None:
        """The row to train next; None where the search is over."""
        count = len(self.summaries)
        if count >= min(self.most, len(self.global_batch_M)):
            reached = "" if self.best is not None else ", and none reached the target"
            self._why = (
                f"{count} points were trained, which is {'all' if count < self.most else 'as many as were to be'}{reached}"
            )
            return None
        chance_M = self.chances_M()
        row = int(np.argmax(chance_M))
        if chance_M[row] < MIN_FASTEST_PROBABILITY:
            self._why = (
                f"no other point is predicted to reach the target more than {self.tolerance:.0%} sooner; "
                f"the likeliest with a probability of {chance_M[row]:.0%}"
            )
            return None
        seconds = float(self.predict().seconds_M[row])
        known = any("steps_to_accuracy" in one for one in self.summaries.values())
        self._why = (
            f"it is predicted to reach the target in {seconds:.3g} s, sooner than the best so far with a probability of "
            f"{chance_M[row]:.0%}"
            if known
            else f"none of {count} reached the target, and of the others it is predicted to be the fastest"
            if count
            else "it is predicted to be the fastest"
        )
        return row

    def why(self) -> str:
        """Why the last answer of `ask` was given, in a sentence."""
        return self._why
