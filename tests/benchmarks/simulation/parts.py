"""The parts of a cluster, each with its own law; nothing here knows a closed form of a step's time.

Shapes: K kernels of a pass, P points of one GPU count, N nodes, G GPUs a node.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
HYPERTHREAD_GAIN = 0.3
"""What the second thread of a core adds, of the first's speed."""
SWITCHING_LOSS = 0.15
"""Share of the cores' speed that is lost when twice as many threads want them as there are."""
MEMORY_BLOCK_MIB = 2.0
"""The allocator takes memory in blocks of this."""


@dataclass(frozen=True)
class Cpu:
    """A node's processors, shared by the loader workers, the ranks' own Python threads and whoever else runs there."""

    cores: int
    hyperthreads: bool
    sockets: int
    remote_loss: float
    """How much longer a thread takes that runs on the other socket than its data lie on."""
    rank_load: float
    """How much of a thread a rank's own Python thread uses."""

    @property
    def threads(self) -> int:
        """What Ray sees as the node's CPUs."""
        return self.cores * 2 if self.hyperthreads else self.cores

    def stretch(self, busy: Floats) -> Floats:
        """How much longer a thread takes when `busy` threads want to run: processor sharing over cores and hyperthreads."""
        speed = np.minimum(busy, self.cores)
        if self.hyperthreads:
            speed = speed + HYPERTHREAD_GAIN * np.clip(busy - self.cores, 0.0, self.cores)
        over = np.maximum(busy / self.threads - 1.0, 0.0)
        return np.maximum(busy / np.maximum(speed, 1e-9), 1.0) * (1.0 + SWITCHING_LOSS * over / (1.0 + over))

    def remote(self, busy: Floats) -> Floats:
        """How much longer a thread takes because some of `busy` threads no longer find room on the socket of their data."""
        if self.sockets == 1:
            return np.ones_like(busy)
        near = self.threads / self.sockets
        return 1.0 + self.remote_loss * np.maximum(1.0 - near / np.maximum(busy, near), 0.0)


@dataclass(frozen=True)
class Loader:
    """What a rank's loader workers do: read an image, decode it, and put batches into a bounded queue in order."""

    decode_s: float
    decode_cv: float
    """Spread of one image's decode time, of its mean."""
    lock_share: float
    """Part of the work for which a rank's workers wait for each other."""
    chunk: int
    """Images that a thread takes at a time."""
    whole_batches: bool
    """Each worker makes a batch of its own, as in PyTorch's loader; else all work on the same one."""
    prefetch: int
    """Batches that the queue holds, of each worker where workers make whole batches."""


@dataclass(frozen=True)
class Storage:
    """Where the images lie: an answer takes its latency, all nodes share the bandwidth, and some answers take very long."""

    latency_s: float
    image_bytes: float
    node_bytes_per_s: float
    shared_bytes_per_s: float
    uncached: float
    """Share of the images that the node's memory does not hold."""
    stalls: float
    """Probability that an image which is not cached stalls its reader."""
    stall_s: float
    """Shortest stall; their lengths have a Pareto distribution."""
    tail: float
    """Its exponent: below 2 the variance is not bounded but by `LONGEST_STALL`."""


LONGEST_STALL = 20.0
"""Of `stall_s`: where the client asks again."""


@dataclass(frozen=True)
class Copying:
    """Host to device: the GPUs of a node copy at the same time over one root."""

    image_bytes: float
    gpu_bytes_per_s: float
    node_bytes_per_s: float
    exposed: float
    """Share that the step waits for; the rest is behind the step before."""


@dataclass(frozen=True)
class Kernels:
    """One pass through a network: kernels of so many tiles an image, run in waves over the GPU's multiprocessors."""

    counts_K: Floats
    tiles_per_image_K: Floats
    wave_s_K: Floats

    def times(self, batch: int, launch_s: float, multiprocessors: int, speedup: float) -> tuple[float, float]:
        """Seconds of the pass, and those of them that the CPU spends on launching while the GPU waits."""
        waves_K = np.ceil(np.ceil(batch * self.tiles_per_image_K) / multiprocessors)
        run_s_K = waves_K * self.wave_s_K / speedup
        short_K = run_s_K < launch_s
        launching_s = float((self.counts_K * short_K).sum() * launch_s)
        return launching_s + float((self.counts_K * run_s_K)[~short_K].sum()), launching_s


@dataclass(frozen=True)
class Gpu:
    """A GPU and the two networks on it."""

    launch_s: float
    multiprocessors: int
    student: Kernels
    backward: Kernels
    teacher: Kernels
    augment_image_s: float
    optimizer_s: float
    odd_batch_loss: float
    """What a pass takes longer where the batch is no multiple of 8."""
    algorithm_spread: float
    """Spread of a pass's time between batches for which other convolution algorithms are chosen."""
    seed: int

    def choice(self, batch: int) -> float:
        """How much longer the passes take at just this batch: its alignment, and the algorithms that were chosen for it."""
        chosen = np.random.default_rng([self.seed, batch]).standard_normal()
        return math.exp(self.algorithm_spread * chosen) * (1.0 + (self.odd_batch_loss if batch % 8 else 0.0))


@dataclass(frozen=True)
class Network:
    """The all-reduce: in two levels where all nodes hold as many ranks, else one ring as slow as its slowest link."""

    gradient_bytes: float
    bucket_bytes: float
    socket_gpus: int
    inside_bytes_per_s: float
    across_sockets_bytes_per_s: float
    between_nodes_bytes_per_s: float
    inside_latency_s: float
    between_latency_s: float
    overlap_cost: float
    """How much the backward pass slows down while the all-reduce runs beside it."""

    @property
    def num_buckets(self) -> int:
        return max(1, round(self.gradient_bytes / self.bucket_bytes))

    def bucket_s(self, num_ranks: int, gpus_per_node: int) -> tuple[float, float]:
        """Seconds of one bucket's all-reduce inside the nodes, and between them."""
        size = self.gradient_bytes / self.num_buckets
        local = min(num_ranks, gpus_per_node)
        nodes = -(-num_ranks // gpus_per_node)
        speed = self.inside_bytes_per_s if local <= self.socket_gpus else self.across_sockets_bytes_per_s
        if num_ranks % gpus_per_node and nodes > 1:
            rounds = 2 * (num_ranks - 1)
            return 0.0, rounds * (self.between_latency_s + size / num_ranks / min(speed, self.between_nodes_bytes_per_s))
        inside_s = 2 * (local - 1) * (self.inside_latency_s + size / local / speed)
        if nodes == 1:
            return inside_s, 0.0
        # A ring over the nodes, or a tree where the latency of its many rounds is what counts.
        bandwidth_s = 2 * (nodes - 1) / nodes * size / self.between_nodes_bytes_per_s
        tree_s = 2 * math.ceil(math.log2(nodes)) * (self.between_latency_s + size / self.between_nodes_bytes_per_s)
        return inside_s, min(2 * (nodes - 1) * self.between_latency_s + bandwidth_s, tree_s)


@dataclass(frozen=True)
class Memory:
    """A GPU's memory: linear in the batch but for the workspace of the algorithms, in the allocator's blocks."""

    fixed_mib: float
    image_mib: float
    gpu_mib: float
    workspace_mib: float
    pressure: float
    """What a step takes longer when over 90% is in use: freed and asked for again."""
    seed: int

    def peak_mib(self, batch: int, factor: float) -> float:
        """`factor`: of what an image takes."""
        workspace_mib = self.workspace_mib * np.random.default_rng([self.seed, batch]).random()
        whole_mib = self.fixed_mib + self.image_mib * factor * batch + workspace_mib
        return float(np.ceil(whole_mib / MEMORY_BLOCK_MIB) * MEMORY_BLOCK_MIB)

    def fits(self, peak_mib: float) -> bool:
        """To the last block: a point at 99% runs."""
        return peak_mib <= self.gpu_mib

    def slowdown(self, peak_mib: float) -> float:
        return 1.0 + (self.pressure if peak_mib > 0.9 * self.gpu_mib else 0.0)


@dataclass(frozen=True)
class Heat:
    """GPUs that warm up with the work they do and cool down without, and throttle above a threshold."""

    throttle_NG: Floats
    """How much longer a GPU takes at its hottest."""
    threshold: float
    """Warmth, 0 to 1, from which on it throttles."""
    constant_s: float
    """In which the warmth comes two thirds nearer to the load."""

    def slowdown(self, warmth_PNG: Floats) -> Floats:
        n, g = warmth_PNG.shape[1:]
        return 1.0 + self.throttle_NG[:n, :g] * np.maximum(warmth_PNG - self.threshold, 0.0) / (1.0 - self.threshold)


@dataclass(frozen=True)
class Jitter:
    """All that makes one step differ from the next, and one GPU from the other."""

    step_noise: float
    """Spread of a step, common to all ranks."""
    rank_noise: float
    spike_rate: float
    """Probability that a rank's step is interrupted."""
    spike: float
    """Shortest interruption, of the step's own time; their lengths have a Pareto distribution of exponent 2."""
    read_noise: float
    """Spread of a node's reading speed, which lasts for some 20 steps."""
    link_noise: float
    lasting_NG: Floats
    """How many times as long a GPU takes, for good."""


LONGEST_SPIKE = 10.0


@dataclass(frozen=True)
class Load:
    """What others take from the cluster at one time."""

    busy_N: Floats
    """Threads that run on each node."""
    storage: float
    """Share of the storage's bandwidth that is left."""
    links: float
    """Share of the bandwidth between nodes that is left."""
    gpu_NG: Floats
    """How many times as long a GPU takes that is shared."""


@dataclass(frozen=True)
class Tenant:
    """Somebody else on the cluster, who comes and goes."""

    times_s: tuple[tuple[float, float], ...]
    """From when to when."""
    load: Load

    def is_there(self, at_s: float) -> bool:
        return any(first_s <= at_s < last_s for first_s, last_s in self.times_s)


@dataclass(frozen=True)
class Plant:
    """Everything that is true of a cluster and that a searcher does not know."""

    nodes: int
    gpus_per_node: int
    num_images: int
    start_s: float
    """Of a new group of workers."""
    setup_s: float
    """Of each point: models built, algorithms tried."""
    cpu: Cpu
    loader: Loader
    storage: Storage
    copying: Copying
    gpu: Gpu
    network: Network
    memory: Memory
    heat: Heat
    jitter: Jitter
    failures: float
    """Probability that a probe fails for no cause of its own."""

    @property
    def alone(self) -> Load:
        """Nobody else is there."""
        return Load(np.zeros(self.nodes), 1.0, 1.0, np.ones((self.nodes, self.gpus_per_node)))


@dataclass(frozen=True)
class BuildContext:
    """A point as the machine sees it: per rank, and with what a choice such as a precision changes."""

    num_workers: int
    batch: int
    """Images a rank and step."""
    loader_workers: int
    decode: float = 1.0
    """Factor of the decode time."""
    gpu_image_s: float = 0.0
    """GPU seconds an image on top, such as decoding there."""
    speedup: float = 1.0
    memory: float = 1.0


def per_point(settings: list[BuildContext], value: Callable[[BuildContext], float]) -> Floats:
    """One number a point, shaped P×1×1 to meet N×G."""
    return np.array([value(setting) for setting in settings], dtype=float)[:, None, None]
