"""Steps to an accuracy at each global batch, and with a step's time how long it takes: bigger batches learn less from an image.

    S(B) = S_min·(1 + B_noise/B) steps        E(B) = S_min·(B + B_noise) images

(McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.3). It holds for learning rates that are right
for their batch; where one rate serves all, or rises with the batch beyond what is stable, trainings tell another B_noise than
the gradients do, which is why the measured one is a prior here and no more.

Shapes: M points, O trainings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from service.config.space import GLOBAL_BATCH
from service.search.points import Array, Point

FORM = 1.0  # standard deviation of log(B_noise) around a measured B_simple: they agree to an order of magnitude
UNMEASURED = (500.0, 3.0)  # B_noise in images where nothing measured it, and the standard deviation of its logarithm
UNKNOWN = 8.0  # standard deviation of log(S_min) before a training
SEEDS = 0.12  # relative: what another seed changes about the steps that a training takes


@dataclass(frozen=True)
class Training:
    """One training towards the target."""

    global_batch: float
    steps: float
    """At the evaluation that saw the target first, or, where none did, at the end."""
    every: float
    """Steps between evaluations."""
    reached: bool = True


@dataclass(frozen=True)
class TimesToTarget:
    """Times to the target of M points."""

    seconds_M: Array
    """Medians."""
    spread_M: Array
    """Standard deviation of their logarithms."""


@dataclass(frozen=True)
class Learning:
    """What is believed of S_min and B_noise: their logarithms are normal together."""

    mean_2: Array
    covariance_22: Array

    @classmethod
    def of(cls, noise_scales: Sequence[float] = (), trainings: Sequence[Training] = ()) -> Learning:
        """The belief after noise scales (images) that trainings have measured, and after trainings to the target.

        Maximum a posteriori and its curvature. A training is known to half of what lies between two evaluations; one that
        never reached the target only says that it takes longer.

        Raises:
            ValueError: a noise scale, a batch or a number of steps that is not positive.
        """
        positive = [*noise_scales, *(number for t in trainings for number in (t.global_batch, t.steps, t.every))]
        if not all(number > 0 and math.isfinite(number) for number in positive):
            raise ValueError(f"noise scales, batches and steps are above 0, not {min(positive):g}")
        logs = np.log(noise_scales) if len(noise_scales) else np.log(UNMEASURED[:1])
        scatter = float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        prior = float(logs.mean())
        spread = math.hypot(FORM, scatter) if len(noise_scales) else UNMEASURED[1]
        batch_O = np.array([t.global_batch for t in trainings])
        reached_O = np.array([t.reached for t in trainings], dtype=bool)
        between_O = np.array([t.every for t in trainings])
        steps_reported_O = np.array([t.steps for t in trainings])
        # Somewhere in the last `every` steps: their middle, and the deviation of a uniform distribution over them.
        steps_O = np.where(reached_O, np.maximum(steps_reported_O - between_O / 2, between_O / 2), steps_reported_O)
        error_O = np.hypot(SEEDS, np.where(reached_O, between_O, 0.0) / math.sqrt(12) / steps_O)
        known_O = steps_O[reached_O] if reached_O.any() else steps_O
        begin = np.array([float(np.log(np.median(known_O))) if len(known_O) else 0.0, prior])

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
        """Steps to the target."""
        return np.exp(_log_steps(self.mean_2, global_batch_M))

    def images_M(self, global_batch_M: Array) -> Array:
        """Images to the target; without a training behind it only their quotients mean something."""
        return self.steps_M(global_batch_M) * global_batch_M

    def factor(self, point: Point) -> float:
        """What a point's seconds for an image are multiplied by in a search for time: see `images_M`."""
        return float(self.images_M(np.array([float(point[GLOBAL_BATCH])]))[0])

    def spread_M(self, global_batch_M: Array) -> Array:
        """Standard deviation of the logarithm of `steps_M`."""
        return self._deviation_M(_jacobian(self.mean_2, global_batch_M))

    def _deviation_M(self, J_M2: Array) -> Array:
        """Standard deviation of what has the derivatives `J_M2` by both logarithms."""
        return np.asarray(np.sqrt(np.einsum("mi,ij,mj->m", J_M2, self.covariance_22, J_M2)))

    def time_to_accuracy(
        self,
        global_batch_M: Array,
        step_s_M: Array,
        step_spread_M: Array | float = 0.0,
        every_M: Array | float = 0.0,
    ) -> TimesToTarget:
        """Seconds to the target, the wait for the next of the evaluations included that lie `every_M` steps apart.

        `step_s_M`: seconds of a step, measured or predicted, with the standard deviation of their logarithms.
        """
        steps_M = self.steps_M(global_batch_M)
        paid_M = steps_M + np.asarray(every_M) / 2
        seconds_M = paid_M * step_s_M
        J_M2 = _jacobian(self.mean_2, global_batch_M) * (steps_M / paid_M)[:, None]
        return TimesToTarget(seconds_M, np.hypot(self._deviation_M(J_M2), np.asarray(step_spread_M)))


def _log_steps(logs_2: Array, global_batch_M: Array) -> Array:
    return np.asarray(logs_2[0] + np.log1p(np.exp(logs_2[1]) / global_batch_M))


def _jacobian(logs_2: Array, global_batch_M: Array) -> Array:
    """Derivatives of `_log_steps` by both logarithms."""
    share_M = np.exp(logs_2[1]) / (global_batch_M + np.exp(logs_2[1]))
    return np.stack([np.ones_like(share_M), share_M], axis=1)
