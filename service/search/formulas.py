"""The formulas of a step's time: from a few physical parameters and the layout of a point to seconds.

    step   = max(supply, work)                    prefetch overlaps loading with the GPU (tf.data: Murray et al. 2021)
    supply = batch / min(threads, cores, disk)    a node's workers share its cores and its disk
    work   = (local + exposed) · (1 + straggler·(H_n − 1))
    local  = (fixed + image·max(batch, knee)) · (1 + sharing·(per_node − 1))
    exposed= max(0, reduce − hidden·backward)     smooth: reduce²/(reduce + hidden·backward)

With p pipeline stages and m micro-batches, p workers share a replica's work, and wait for each other in (p − 1)/(m + p − 1) of a
step (Huang et al. 2019); each reduces its own parameters, after its passes. Where a point leaves m open it is the number that
makes the step shortest. What uneven stages and their sends cost is in the multiplier that each value of an extra key gets.

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
LEAST_S = 1e-9  # in place of zero, where it divides
SHARPNESS = 12.0  # of the p-norms: two equal terms give 6% more than either


@dataclass(frozen=True)
class Times:
    """Seconds of a step and of its parts, shaped ...M."""

    step: Array
    supply: Array  # what the loader alone would take
    work: Array  # everything but the wait for data
    forward: Array  # mean of the workers: of pipeline stages without the bubble
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
    stages, per_node = layout.stages_M, layout.per_node_M
    batch, threads = layout.batch_M * stages, np.maximum(layout.threads_M, 1)  # images of a replica
    loading = np.maximum(per_node / stages, 1)  # replicas on the fullest node: the first stage loads

    rate = of["thread_images_per_s"] * decode
    contended = 1 + of["thread_contention"] * (threads * loading - 1)
    free_cores = np.maximum(layout.cores - 0.5 * per_node, 0.5 * layout.cores)  # the training threads take their part
    excess = np.maximum((threads * loading + per_node) / layout.cores - 1, 0)
    supply = _larger(
        batch * contended / (rate * threads),
        batch * loading / (rate * free_cores) * (1 + of["crowding_supply"] * excess),
        batch * loading / of["node_images_per_s"] + 0 * rate,
    )
    crowded = (1 + of["sharing"] * (per_node - 1)) * (1 + of["crowding_work"] * excess)

    local, waits = np.full_like(rate * batch, np.inf), np.ones_like(rate * batch)
    for micro_batches in layout.micro_batches_CM:
        share = (micro_batches + stages - 1) / (micro_batches * stages)  # of a replica's work that a step waits for
        filled = share * np.sqrt(batch**2 + (micro_batches * of["knee_images"]) ** 2)  # a GPU fills gradually
        computed = of["image_s"] * slower * filled
        fixed = of["fixed_s"] * micro_batches * share * crowded
        local_s = fixed + computed * crowded
        waits = np.where(local_s < local, share * stages, waits)
        local = np.minimum(local, local_s)
    forward = local * np.minimum(of["forward_share"], 0.9) / waits  # the bubble is no part of it
    backward = local - forward
    workers = layout.workers_M
    replicas = np.maximum(workers / stages, 1)
    nodes = np.minimum(layout.nodes_M, replicas)
    in_node = of["reduce_node_s"] * (loading - 1) / loading
    reduce = (in_node + of["reduce_net_s"] * (nodes - 1) / nodes) / stages + of["hop_s"] * (replicas - 1)
    cover = np.where(stages > 1, LEAST_S, np.minimum(of["hidden_share"], 1.0) * backward)
    exposed = reduce**2 / (reduce + cover)  # reduce − cover where that is large, never zero: the last bucket has no cover
    harmonic = digamma(workers + 1) + np.euler_gamma
    work = (local + exposed) * (1 + of["straggler"] * (harmonic - 1))
    order = np.maximum(of["overlap"], 1.0)
    top = np.maximum(supply, work)
    overlapped = top * (1 + (np.minimum(supply, work) / top) ** order) ** (1 / order)
    step = np.where(layout.threads_M > 0, overlapped, supply + work)  # without loader threads nothing overlaps
    return Times(step, supply, work, forward, local, exposed)
