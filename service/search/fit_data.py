"""Observations as a fit wants them: logarithms of step, work and forward, and how far each may be off.

Shapes: ... any leading axes (samples of the parameters), M points, N points joined to them, P parameters, R residuals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from service.search.formulas import step_times
from service.search.points import Array, Layout, Observation
from service.search.step_time_statistics import SlowSteps

MODEL_ERROR = {"step": 0.03, "work": 0.05, "forward": 0.08}  # relative: what a form this simple is off by, at best
LEAST_NOISE, UNKNOWN_NOISE = 0.005, 0.05  # of a probe's mean; the latter of a probe of one step


@dataclass(frozen=True)
class Measured:
    """Observations as residuals want them: logarithms and their standard deviations, NaN where not measured."""

    layout: Layout
    logs_3M: Array  # step, work, forward
    errors_3M: Array
    noise_M: Array  # of the step alone, without what the model's form is off by
    slow: SlowSteps

    @classmethod
    def of(cls, layout: Layout, observations: Sequence[Observation]) -> Measured:
        """Means of `ok` observations. Layout and observations go together."""
        slow = SlowSteps.of([observation.steps_s for observation in observations])
        logs_3M = np.full((3, len(observations)), np.nan)
        errors_3M = np.ones_like(logs_3M)
        noise_M = np.zeros(len(observations))
        for m, observation in enumerate(observations):
            mean = slow.mean(observation.steps_s)
            step, noise = mean.step_s, max(mean.error, LEAST_NOISE) if math.isfinite(mean.error) else UNKNOWN_NOISE
            noise_M[m] = noise
            parts = observation.phases_s
            # Phases are means over ranks and may come from a timer of their own: shares are taken of their own sum.
            total = sum(parts.values())
            work = step * (1 - parts["data"] / total) if "data" in parts and total > 0 else math.nan
            forward = step * (parts.get("teacher", 0.0) + parts["student"]) / total if "student" in parts else math.nan
            for row, (name, value) in enumerate((("step", step), ("work", work), ("forward", forward))):
                if value > 0:
                    logs_3M[row, m] = math.log(value)
                errors_3M[row, m] = math.hypot(noise, MODEL_ERROR[name])
        return cls(layout, logs_3M, errors_3M, noise_M, slow)

    def joined(self, logs_3N: Array, layout: Layout) -> Measured:
        """These and N more that are taken for measured; `layout` is of all."""
        count = logs_3N.shape[1]
        errors = np.array(list(MODEL_ERROR.values()))[:, None] * np.ones(count)
        return Measured(
            layout,
            np.concatenate([self.logs_3M, logs_3N], axis=1),
            np.concatenate([self.errors_3M, errors], axis=1),
            np.concatenate([self.noise_M, np.full(count, UNKNOWN_NOISE / 2)]),
            self.slow,
        )

    def without(self, change_M: Array, doubt_M: Array | float = 0.0) -> Measured:
        """These, had the cluster always been in its usual state; `change_M` is what its state at the time has added.

        `doubt_M`: the standard deviation of that.
        """
        return replace(
            self,
            logs_3M=self.logs_3M - change_M,
            errors_3M=np.hypot(self.errors_3M, doubt_M),
            noise_M=np.hypot(self.noise_M, doubt_M),
        )

    def residuals(self, logs: Array) -> Array:
        """Model less measurement in standard deviations, for parameters ...P: ...R."""
        known = np.isfinite(self.logs_3M)
        observation = step_times(logs, self.layout)
        model = np.log(np.stack([observation.step, observation.work, observation.forward], axis=-2))[..., known]
        return np.asarray((model - self.logs_3M[known]) / self.errors_3M[known])
