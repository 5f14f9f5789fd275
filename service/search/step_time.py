"""The time of a training step from a few physical parameters, and those parameters from measured steps.

    step   = max(supply, work)                        prefetch overlaps loading with the GPU (Crossbow, tf.data: Murray et al. 2021)
    supply = batch / min(threads, cores, disk)        a node's workers share its cores and its disk
    work   = (local + exposed) · (1 + straggler·(H_n − 1))
    local  = (fixed + image·max(batch, knee)) · (1 + sharing·(per_node − 1))
    exposed= max(0, reduce − hidden·backward)         smooth: reduce²/(reduce + hidden·backward)

Every other `max` is a p-norm, since queues round corners. Shapes: ... any leading axes (samples of the parameters), M points,
P parameters, R residuals, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares
from scipy.special import digamma

from service.search.points import Array, Category, Hardware, Layout, Observation, Point, categories
from service.search.probes import SlowSteps


@dataclass(frozen=True)
class Parameter:
    """One physical quantity: its logarithm is believed to be normal before anything is measured."""

    name: str
    unit: str
    median: float
    spread: float  # standard deviation of the logarithm: 0.7 is a factor of 2 either way


PARAMETERS = (
    Parameter("thread_images_per_s", "images/s of one loader thread", 300.0, 1.7),
    Parameter("thread_contention", "slowdown of a thread for each further one on its node (memory, locks)", 0.01, 1.0),
    Parameter("node_images_per_s", "images/s that a node's disk or network brings", 2e4, 1.7),
    Parameter("overlap", "sharpness of max(supply, work): 1 is none, many is a queue that never runs dry", 6.0, 0.6),
    Parameter("crowding_supply", "slowdown of decoding for each thread too many, per core", 0.1, 1.0),
    Parameter("crowding_work", "slowdown of the GPU's host for each thread too many, per core", 0.02, 1.0),
    Parameter("image_s", "s of one image on a full GPU", 2e-3, 2.0),
    Parameter("knee_images", "images below which a GPU is not full", 8.0, 1.0),
    Parameter("fixed_s", "s of launches and Python a step", 2e-2, 1.5),
    Parameter("forward_share", "share of the local work that is forward (teacher and student)", 0.35, 0.5),
    Parameter("reduce_node_s", "s of an all-reduce inside a node at infinitely many workers", 5e-3, 1.7),
    Parameter("reduce_net_s", "s of an all-reduce between nodes at infinitely many nodes", 3e-2, 1.7),
    Parameter("hop_s", "s of latency for each further worker in the ring", 3e-5, 1.2),
    Parameter("hidden_share", "share of the backward that an all-reduce may hide behind", 0.5, 0.5),
    Parameter("sharing", "slowdown for each further worker on a node (PCIe, heat, host threads)", 0.02, 1.3),
    Parameter("straggler", "slowdown of the slowest of n workers, per H_n − 1", 0.02, 1.0),
)
PLACE = {parameter.name: place for place, parameter in enumerate(PARAMETERS)}
EXTRA_SPREAD = 0.5  # of the two multipliers (decode speed, GPU speed) that each further value of an extra key gets
SHARPNESS = 12.0  # of the p-norms: two equal terms give 6% more than either
MODEL_ERROR = {"step": 0.03, "work": 0.05, "forward": 0.08}  # relative: what a form this simple is off by, at best
LEAST_NOISE, UNKNOWN_NOISE = 0.005, 0.05  # of a probe's mean; the latter of a probe of one step
ROBUST = 2.0  # residuals beyond so many standard deviations count linearly, not squared


@dataclass(frozen=True)
class Times:
    """Seconds of a step and of its parts, shaped ...M."""

    step: Array
    supply: Array  # what the loader alone would take
    work: Array  # everything but the wait for data
    forward: Array
    local: Array  # one worker's own work, nobody waited for
    exposed: Array  # all-reduce that the backward does not hide

    @property
    def data(self) -> Array:
        """The wait for data."""
        return self.step - self.work


def _larger(*terms: Array, sharpness: float | Array = SHARPNESS) -> Array:
    """A maximum with round corners, ≥ every term."""
    top = np.maximum.reduce(terms)
    return top * sum((term / top) ** sharpness for term in terms) ** (1 / sharpness)


def times(logs: Array, layout: Layout) -> Times:
    """The model's formulas, for parameters `logs` shaped ...P (natural logarithms).

    Sources: threads that share a lock, w/(1 + c(w − 1)): Amdahl 1967 as Gunther writes it; ring all-reduce,
    2(n − 1)/n of the bytes over the bandwidth and a latency a hop: Patarasu and Yuan 2009; hierarchical over nodes: Goyal et
    al. 2017; hidden behind the backward: Li et al. 2020 (PyTorch DDP); slowest of n exponential delays, H_n of their mean:
    Rényi 1953, H_n = ψ(n + 1) + γ.
    """
    values = np.exp(logs)[..., None, :]
    of = {name: values[..., place] for name, place in PLACE.items()}
    extra = logs[..., len(PARAMETERS) :]
    count = len(layout.member_KM)
    decode = np.exp(extra[..., :count] @ layout.member_KM)  # ...M
    slower = np.exp(extra[..., count:] @ layout.member_KM)
    batch, threads, per_node = layout.batch_M, np.maximum(layout.threads_M, 1), layout.per_node_M

    rate = of["thread_images_per_s"] * decode
    contended = 1 + of["thread_contention"] * (threads * per_node - 1)
    free_cores = np.maximum(layout.cores - 0.5 * per_node, 0.5 * layout.cores)  # the training threads take their part
    excess = np.maximum((threads + 1) * per_node / layout.cores - 1, 0)
    supply = _larger(
        batch * contended / (rate * threads),
        batch * per_node / (rate * free_cores) * (1 + of["crowding_supply"] * excess),
        batch * per_node / of["node_images_per_s"] + 0 * rate,
    )
    computed = of["image_s"] * slower * _larger(batch + 0 * of["knee_images"], of["knee_images"] + 0 * batch)
    crowded = (1 + of["sharing"] * (per_node - 1)) * (1 + of["crowding_work"] * excess)
    fixed = of["fixed_s"] * crowded
    local = fixed + computed * crowded
    forward = local * np.minimum(of["forward_share"], 0.9)
    backward = local - forward
    nodes, workers = layout.nodes_M, layout.workers_M
    reduce = (
        of["reduce_node_s"] * (per_node - 1) / per_node
        + of["reduce_net_s"] * (nodes - 1) / nodes
        + of["hop_s"] * (workers - 1)
    )
    cover = np.minimum(of["hidden_share"], 1.0) * backward
    exposed = reduce**2 / (reduce + cover)  # reduce − cover where that is large, never zero: the last bucket has no cover
    harmonic = digamma(workers + 1) + np.euler_gamma
    work = (local + exposed) * (1 + of["straggler"] * (harmonic - 1))
    overlapped = _larger(supply, work, sharpness=np.maximum(of["overlap"], 1.0))
    step = np.where(layout.threads_M > 0, overlapped, supply + work)  # without loader threads nothing overlaps
    return Times(step, supply, work, forward, local, exposed)


@dataclass(frozen=True)
class Measured:
    """Observations as residuals want them: logarithms and their standard deviations, NaN where not measured."""

    layout: Layout
    logs_3M: Array  # step, work, forward
    errors_3M: Array
    noise_M: Array  # of the step alone, without what the model's form is off by

    @classmethod
    def of(cls, layout: Layout, observations: Sequence[Observation]) -> Measured:
        """Means of `ok` observations. Layout and observations go together."""
        slow = SlowSteps.of([seen.steps_s for seen in observations])
        logs_3M = np.full((3, len(observations)), np.nan)
        errors_3M = np.ones_like(logs_3M)
        noise_M = np.zeros(len(observations))
        for m, seen in enumerate(observations):
            mean = slow.mean(seen.steps_s)
            step, noise = mean.step_s, max(mean.error, LEAST_NOISE) if math.isfinite(mean.error) else UNKNOWN_NOISE
            noise_M[m] = noise
            parts = seen.phases_s
            # Phases are means over ranks and may come from a timer of their own: shares are taken of their own sum.
            total = sum(parts.values())
            work = step * (1 - parts["data"] / total) if "data" in parts and total > 0 else math.nan
            forward = step * (parts.get("teacher", 0.0) + parts["student"]) / total if "student" in parts else math.nan
            for row, (name, value) in enumerate((("step", step), ("work", work), ("forward", forward))):
                if value > 0:
                    logs_3M[row, m] = math.log(value)
                errors_3M[row, m] = math.hypot(noise, MODEL_ERROR[name])
        return cls(layout, logs_3M, errors_3M, noise_M)

    def joined(self, logs_3N: Array, layout: Layout) -> Measured:
        """These and N more that are taken for measured; `layout` is of all."""
        count = logs_3N.shape[1]
        errors = np.array(list(MODEL_ERROR.values()))[:, None] * np.ones(count)
        return Measured(
            layout,
            np.concatenate([self.logs_3M, logs_3N], axis=1),
            np.concatenate([self.errors_3M, errors], axis=1),
            np.concatenate([self.noise_M, np.full(count, UNKNOWN_NOISE / 2)]),
        )

    def residuals(self, logs: Array) -> Array:
        """Model less measurement in standard deviations, for parameters ...P: ...R."""
        known = np.isfinite(self.logs_3M)
        seen = times(logs, self.layout)
        model = np.log(np.stack([seen.step, seen.work, seen.forward], axis=-2))[..., known]
        return (model - self.logs_3M[known]) / self.errors_3M[known]


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
        return {p.name: float(np.exp(self.mean_P[place])) for place, p in enumerate(PARAMETERS)}

    def layout(self, points: Sequence[Point]) -> Layout:
        """The points as this model reads them."""
        return Layout.of(points, self.hardware, self.extras)

    def fitted(self, measured: Measured) -> StepTime:
        """The parameters that explain the observations best, self being the prior.

        Robust least squares on relative residuals (`scipy.optimize.least_squares`, soft L1), the prior as further residuals;
        uncertainty by Laplace's approximation: the inverse of JᵀJ at the solution.
        """
        spread_P = np.sqrt(np.diag(self.covariance_PP))
        nudges = np.eye(len(spread_P)) * 1e-4

        def residuals(steps: Array) -> Array:  # ...P in prior standard deviations → ...R
            return np.concatenate([measured.residuals(self.mean_P + spread_P * steps), steps], axis=-1)

        def jacobian(steps: Array) -> Array:  # every parameter's central difference in one call of the model
            both = residuals(np.concatenate([steps + nudges, steps - nudges]))
            return (both[: len(steps)] - both[len(steps) :]).T / 2e-4

        # An all-reduce that hides in the prior's backward has no slope: a second start has it out in the open.
        starts = [np.zeros_like(self.mean_P), np.zeros_like(self.mean_P)]
        starts[1][[PLACE["reduce_node_s"], PLACE["reduce_net_s"]]] = 2.0
        starts[1][PLACE["sharing"]] = 1.0
        found = min(
            (
                least_squares(residuals, start, jacobian, loss="soft_l1", f_scale=ROBUST, max_nfev=40, xtol=1e-4, ftol=1e-5)
                for start in starts
            ),
            key=lambda one: float(one.cost),
        )
        covariance = np.linalg.inv(found.jac.T @ found.jac + 1e-9 * np.eye(len(found.x)))
        return replace(
            self, mean_P=self.mean_P + spread_P * found.x, covariance_PP=spread_P[:, None] * covariance * spread_P
        )

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
        weights_S = np.exp(weights_S - weights_S.max())
        weights_S = np.minimum(weights_S, weights_S.mean() * math.sqrt(count))
        return logs_SP, weights_S / weights_S.sum()

    def jacobian(self, layout: Layout) -> Array:
        """How the logarithms of step, work and forward of each point move with the parameters: 3MP."""
        nudge = 1e-4
        moves = np.eye(len(self.mean_P)) * nudge
        both = times(np.concatenate([self.mean_P + moves, self.mean_P - moves]), layout)
        logs = np.log(np.stack([both.step, both.work, both.forward], axis=1))  # 2P, 3, M
        count = len(self.mean_P)
        return np.moveaxis((logs[:count] - logs[count:]) / (2 * nudge), 0, -1)

    def predict(self, points: Sequence[Point]) -> Prediction:
        """Seconds of a step, with the standard deviation that the parameters' uncertainty gives, and each part apart."""
        layout = self.layout(points)
        J_MP = self.jacobian(layout)[0]
        mean = times(self.mean_P, layout)
        relative_M = np.sqrt(np.einsum("mp,pq,mq->m", J_MP, self.covariance_PP, J_MP))
        return Prediction(mean.step, mean.step * relative_M, mean)


@dataclass(frozen=True)
class Prediction:
    """Of M points."""

    step_s: Array
    step_sd_s: Array
    times: Times

    def epoch_s(self, points: Sequence[Point], num_images: int) -> Array:
        """Seconds of an epoch of `num_images`."""
        return self.step_s * num_images / np.array([float(p["data.global_batch_size"]) for p in points])


def fit(points: Sequence[Point], observations: Sequence[Observation], hardware: Hardware) -> StepTime:
    """The model fitted to the observations that are `ok`; to none: the prior.

    Raises:
        KeyError: a point without one of the three axes of every sweep.
    """
    prior = StepTime.prior(hardware, categories(points))
    pairs = [(p, seen) for p, seen in zip(points, observations, strict=True) if seen.status == "ok" and len(seen.steps_s)]
    if not pairs:
        return prior
    return prior.fitted(Measured.of(prior.layout([p for p, _ in pairs]), [seen for _, seen in pairs]))
