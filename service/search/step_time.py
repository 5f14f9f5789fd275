"""The step-time model: physical parameters, fitted to measured steps, and what they predict for every point.

    step   = max(supply, work)                    prefetch overlaps loading with the GPU (tf.data: Murray et al. 2021)
    supply = batch / min(threads, cores, disk)    a node's workers share its cores and its disk
    work   = (local + exposed) · (1 + straggler·(H_n − 1))
    local  = (fixed + image·max(batch, knee)) · (1 + sharing·(per_node − 1))
    exposed= max(0, reduce − hidden·backward)     smooth: reduce²/(reduce + hidden·backward)

Every other `max` is a p-norm, since queues round corners. Too many threads for the cores slow both sides.
Shapes: ... any leading axes (draws of the parameters), M points, O measured ones, P parameters, S draws.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares
from scipy.special import digamma

from service.runs.result import ClusterHardware
from service.search.points import Array, Category, Layout, Observation, Point, relative_error


@dataclass(frozen=True)
class Parameter:
    """One physical quantity; before anything is measured its logarithm is normal."""

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
    Parameter("knee_images", "images below which a GPU is not full", 32.0, 1.0),
    Parameter("fixed_s", "s of launches and Python a step", 2.5e-2, 1.5),
    Parameter("forward_share", "share of the local work that is forward (teacher and student)", 0.35, 0.5),
    Parameter("reduce_node_s", "s of an all-reduce inside a node at infinitely many workers", 5e-3, 1.7),
    Parameter("reduce_net_s", "s of an all-reduce between nodes at infinitely many nodes", 3e-2, 1.7),
    Parameter("hop_s", "s of latency for each further worker in the ring", 3e-5, 1.2),
    Parameter("hidden_share", "share of the backward that an all-reduce may hide behind", 0.5, 0.5),
    Parameter("sharing", "slowdown for each further worker on a node (PCIe, heat, host threads)", 0.05, 1.3),
    Parameter("straggler", "slowdown of the slowest of n workers, per H_n − 1", 0.02, 1.0),
)
INDEX = {parameter.name: index for index, parameter in enumerate(PARAMETERS)}
EXTRA_SPREAD = 0.5  # of the two multipliers (decode speed, GPU speed) that each further value of an extra key gets
SHARPNESS = 12.0  # of the p-norms: two equal terms give 6% more than either
FORM_ERROR = np.array([[0.03], [0.05], [0.08]])  # what a form this simple is off by, at best: step, work, forward
MIN_NOISE, UNKNOWN_NOISE = 0.005, 0.05  # of a probe's mean; the latter of a probe of one step
ROBUST = 2.0  # residuals beyond so many standard deviations count linearly, not squared


@dataclass(frozen=True)
class Times:
    """Seconds of a step and of its parts, shaped ...M."""

    step: Array
    supply: Array  # what the loader alone would take
    work: Array  # everything but the wait for data
    forward: Array

    @property
    def logs(self) -> Array:
        """Logarithms of what is measured: step, work, forward, shaped ...3M."""
        return np.log(np.stack([self.step, self.work, self.forward], axis=-2))


def _larger(*terms: Array) -> Array:
    """A maximum with round corners, ≥ every term: the p-norm of order SHARPNESS, by products, since powers are slow."""
    top = functools.reduce(np.maximum, terms)
    total = np.zeros_like(top)
    for term in terms:
        fourth = (term / top) ** 2
        fourth *= fourth
        total += fourth**2 * fourth
    return np.asarray(top * total ** (1 / SHARPNESS))


def step_times(logs: Array, layout: Layout) -> Times:
    """The model's formulas, for parameters `logs` shaped ...P (natural logarithms).

    Sources: threads that share a lock, w/(1 + c(w − 1)): Amdahl 1967 as Gunther writes it; ring all-reduce,
    2(n − 1)/n of the bytes over the bandwidth and a latency a hop: Patarasu and Yuan 2009; hierarchical over nodes: Goyal et
    al. 2017; hidden behind the backward: Li et al. 2020 (PyTorch DDP); slowest of n exponential delays, H_n of their mean:
    Rényi 1953, H_n = ψ(n + 1) + γ.
    """
    values = np.exp(logs)[..., None, :]
    of = {name: values[..., index] for name, index in INDEX.items()}
    extra = logs[..., len(PARAMETERS) :]
    count = len(layout.member_KM)
    decode = np.exp(extra[..., :count] @ layout.member_KM)  # ...M
    slower = np.exp(extra[..., count:] @ layout.member_KM)
    per_node, batch, threads = layout.per_node_M, layout.batch_M, np.maximum(layout.threads_M, 1)

    rate = of["thread_images_per_s"] * decode
    contended = 1 + of["thread_contention"] * (threads * per_node - 1)
    free_cores = np.maximum(layout.cores - 0.5 * per_node, 0.5 * layout.cores)  # the training threads take their part
    excess = np.maximum((threads * per_node + per_node) / layout.cores - 1, 0)
    supply = _larger(
        batch * contended / (rate * threads),
        batch * per_node / (rate * free_cores) * (1 + of["crowding_supply"] * excess),
        batch * per_node / of["node_images_per_s"] + 0 * rate,
    )
    crowded = (1 + of["sharing"] * (per_node - 1)) * (1 + of["crowding_work"] * excess)

    filled = np.sqrt(batch**2 + of["knee_images"] ** 2)  # a GPU fills gradually
    local = of["fixed_s"] * crowded + of["image_s"] * slower * filled * crowded
    forward = local * np.minimum(of["forward_share"], 0.9)
    workers, nodes = layout.workers_M, layout.nodes_M
    in_node = of["reduce_node_s"] * (per_node - 1) / per_node
    reduce = in_node + of["reduce_net_s"] * (nodes - 1) / nodes + of["hop_s"] * (workers - 1)
    cover = np.minimum(of["hidden_share"], 1.0) * (local - forward)
    exposed = reduce**2 / (reduce + cover)  # reduce − cover where that is large, never zero: the last bucket has no cover
    harmonic = digamma(workers + 1) + np.euler_gamma
    work = (local + exposed) * (1 + of["straggler"] * (harmonic - 1))
    order = np.maximum(of["overlap"], 1.0)
    top = np.maximum(supply, work)
    overlapped = top * (1 + (np.minimum(supply, work) / top) ** order) ** (1 / order)
    step = np.where(layout.threads_M > 0, overlapped, supply + work)  # without loader threads nothing overlaps
    return Times(step, supply, work, forward)


@dataclass(frozen=True)
class Measured:
    """Observations as a fit wants them: logarithms of step, work and forward, NaN where not measured, and their errors."""

    layout: Layout
    logs_3O: Array
    noise_O: Array  # standard deviation of the step's logarithm, by its steps alone

    @classmethod
    def of(cls, layout: Layout, observations: Sequence[Observation]) -> Measured:
        """Means of `ok` observations. Layout and observations go together."""
        logs_3O = np.full((3, len(observations)), np.nan)
        noise_O = np.zeros(len(observations))
        for o, one in enumerate(observations):
            error = relative_error(one.steps_s)
            noise_O[o] = max(error, MIN_NOISE) if math.isfinite(error) else UNKNOWN_NOISE
            # Phases are means over ranks and may come from a timer of their own: shares are taken of their own sum.
            step, parts, total = float(np.mean(one.steps_s)), one.phases_s, sum(one.phases_s.values())
            work = 1 - parts["data"] / total if "data" in parts and total > 0 else math.nan
            forward = (parts.get("teacher", 0.0) + parts["student"]) / total if "student" in parts else math.nan
            for row, share in enumerate((1.0, work, forward)):
                if step * share > 0:
                    logs_3O[row, o] = math.log(step * share)
        return cls(layout, logs_3O, noise_O)


@dataclass(frozen=True)
class StepTime:
    """The model with what is known of its parameters: normal in the logarithms."""

    hardware: ClusterHardware
    extras: tuple[Category, ...]
    mean_P: Array
    covariance_PP: Array

    @classmethod
    def prior(cls, hardware: ClusterHardware, extras: tuple[Category, ...] = ()) -> StepTime:
        """What is known before anything is measured."""
        more = [0.0] * (2 * len(extras))
        mean_P = np.array([math.log(p.median) for p in PARAMETERS] + more)
        spread_P = np.array([p.spread for p in PARAMETERS] + [EXTRA_SPREAD for _ in more])
        return cls(hardware, extras, mean_P, np.diag(spread_P**2))

    def layout(self, points: Sequence[Point]) -> Layout:
        """The points as this model reads them."""
        return Layout.of(points, self.hardware, self.extras)

    def fitted(self, measured: Measured) -> StepTime:
        """The parameters that explain the observations best, self being the prior.

        Robust least squares on relative residuals (soft L1), the prior as further residuals; uncertainty by Laplace's
        approximation: the inverse of JᵀJ at the solution.
        """
        spread_P = np.sqrt(np.diag(self.covariance_PP))
        known = np.isfinite(measured.logs_3O)
        target, error = measured.logs_3O[known], np.hypot(FORM_ERROR, measured.noise_O)[known]
        nudges = np.eye(len(spread_P)) * 1e-5

        def residuals(steps: Array) -> Array:  # ...P in prior standard deviations → ...R
            model = step_times(self.mean_P + spread_P * steps, measured.layout).logs[..., known]
            return np.concatenate([(model - target) / error, steps], axis=-1)

        def jacobian(steps: Array) -> Array:  # every parameter's difference in one call of the model
            moved = residuals(np.concatenate([steps + nudges, steps[None]]))
            return np.asarray((moved[:-1] - moved[-1]).T / 1e-5)

        # An all-reduce that hides in the prior's backward has no slope: a second start has it out in the open.
        exposed = np.zeros_like(spread_P)
        exposed[[INDEX["reduce_node_s"], INDEX["reduce_net_s"], INDEX["sharing"]]] = 2.0, 2.0, 1.0
        options = {"loss": "soft_l1", "f_scale": ROBUST, "max_nfev": 30, "xtol": 1e-3, "ftol": 1e-4}
        found = least_squares(residuals, np.zeros_like(spread_P), jacobian, **options)
        if found.cost > 0.25 * len(target):
            found = min(found, least_squares(residuals, exposed, jacobian, **options), key=lambda fit: float(fit.cost))
        covariance = np.linalg.inv(found.jac.T @ found.jac + 1e-9 * np.eye(len(found.x)))
        return replace(self, mean_P=self.mean_P + spread_P * found.x, covariance_PP=spread_P[:, None] * covariance * spread_P)

    def draws(self, count: int, rng: np.random.Generator) -> Array:
        """Parameters as the observations leave them possible, the best ones first: SP."""
        unit_SP = rng.standard_normal((count, len(self.mean_P)))
        unit_SP[0] = 0
        return np.asarray(self.mean_P + unit_SP @ np.linalg.cholesky(self.covariance_PP).T)

    def slopes(self, layout: Layout) -> Array:
        """Derivatives of the logarithm of a step's seconds by the parameters: MP."""
        nudges = 1e-4 * np.eye(len(self.mean_P))
        up, down = (np.log(step_times(self.mean_P + sign * nudges, layout).step) for sign in (1, -1))
        return np.asarray((up - down).T / 2e-4)
