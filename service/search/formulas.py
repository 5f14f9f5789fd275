"""The formulas of a step's time: from a few physical parameters and the layout of a point to seconds.

    step   = max(supply, work)                    prefetch overlaps loading with the GPU (tf.data: Murray et al. 2021)
    supply = batch / min(threads, cores, disk)    a node's workers share its cores and its disk
    work   = (local + exposed) · (1 + straggler·(H_n − 1))
    local  = (fixed + image·max(batch, knee)) · (1 + sharing·(per_node − 1))
    exposed= max(0, reduce − hidden·backward)     smooth: reduce²/(reduce + hidden·backward)

Every other `max` is a p-norm, since queues round corners. Too many threads for the cores slow both sides.
Shapes: ... any leading axes (samples of the parameters), M points, P parameters.
"""

import functools
from dataclasses import dataclass

import numpy as np
from scipy.special import digamma

from service.search.points import Array, Layout


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
SHARPNESS = 12.0  # of the p-norms: two equal terms give 6% more than either


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
    return Times(step, supply, work, forward, local, exposed)
