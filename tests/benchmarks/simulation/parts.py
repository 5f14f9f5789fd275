"""The parts of a cluster, each with its own law; nothing here knows a closed form of a step's time.

Shapes: K kernels of a pass, P points of one GPU count, N nodes, G GPUs a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BUSY_LOSS = 0.15
"""Share of the cores' speed that is lost when twice as many threads want them as there are."""


@dataclass(frozen=True)
class Cores:
    """A node's CPU, shared by the loader threads and the ranks' own Python threads."""

    cores: int
    smt_gain: float
    """What the second thread of a core adds, of the first's speed; 0: one thread a core."""
    main_load: float
    """How much of a thread a rank's own Python thread uses."""

    @property
    def threads(self) -> int:
        return self.cores * 2 if self.smt_gain > 0 else self.cores

    def stretch(self, busy: Floats) -> Floats:
        """How much longer a thread takes when `busy` threads want to run: processor sharing."""
        speed = np.minimum(busy, self.cores) + self.smt_gain * np.clip(busy - self.cores, 0.0, self.threads - self.cores)
        over = np.maximum(busy / self.threads - 1.0, 0.0)
        return np.maximum(busy / np.maximum(speed, 1e-9), 1.0) * (1.0 + BUSY_LOSS * over / (1.0 + over))


@dataclass(frozen=True)
class Loading:
    """The loader: its threads read an image, then decode it; a batch waits in a bounded queue."""

    decode_s: float
    decode_cv: float
    """Spread of one image's decode time, of its mean."""
    read_latency_s: float
    image_bytes: float
    node_bytes_per_s: float
    shared_bytes_per_s: float
    """Of the storage that all nodes read from."""
    uncached: float
    """Share of the images that the node's memory does not hold."""
    depth: int
    """Batches that the queue holds, of each worker where workers make whole batches."""
    chunk: int
    """Images that a thread takes at a time."""
    whole_batches: bool
    """A loader worker makes a batch of its own, as in PyTorch's loader, so that they come `loader_workers` at a time."""


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
class Computing:
    """A GPU and the two networks on it."""

    launch_s: float
    multiprocessors: int
    student: Kernels
    backward: Kernels
    teacher: Kernels
    augment_image_s: float
    optimizer_s: float


@dataclass(frozen=True)
class Linking:
    """The ring of the all-reduce; its slowest link sets the pace of each of its rounds."""

    gradient_bytes: float
    bucket_bytes: float
    socket_gpus: int
    bytes_per_s: tuple[float, float, float]
    """Inside a socket, across sockets, across nodes."""
    latency_s: tuple[float, float, float]
    overlap_cost: float
    """How much the backward pass slows down while the all-reduce runs beside it."""

    def bucket_s(self, num_ranks: int, gpus_per_node: int) -> tuple[float, int]:
        """Seconds of one bucket's all-reduce, and the number of buckets. 2·(n − 1) rounds, each moving a bucket's n-th part."""
        num_buckets = max(1, round(self.gradient_bytes / self.bucket_bytes))
        if num_ranks == 1:
            return 0.0, num_buckets
        reach = 2 if num_ranks > gpus_per_node else 1 if num_ranks > self.socket_gpus else 0
        part = self.gradient_bytes / num_buckets / num_ranks
        return 2 * (num_ranks - 1) * (self.latency_s[reach] + part / self.bytes_per_s[reach]), num_buckets


@dataclass(frozen=True)
class Memory:
    """A GPU's memory: linear in the batch, in the allocator's blocks."""

    fixed_mib: float
    image_mib: float
    gpu_mib: float
    pressure: float
    """What a step takes longer when over 88% is in use: freed and asked for again."""

    def peak_mib(self, batch: int, factor: float) -> float:
        return float(np.ceil((self.fixed_mib + self.image_mib * factor * batch) / 20.0) * 20.0)

    def fits(self, peak_mib: float) -> bool:
        return peak_mib <= 0.96 * self.gpu_mib

    def slowdown(self, peak_mib: float) -> float:
        return 1.0 + (self.pressure if peak_mib > 0.88 * self.gpu_mib else 0.0)


@dataclass(frozen=True)
class Trouble:
    """All that makes one step differ from the next, and one GPU from the other."""

    step_noise: float
    """Spread of a step, common to all ranks."""
    rank_noise: float
    read_noise: float
    """Spread of a node's reading speed, which lasts for some 20 steps."""
    link_noise: float
    prone_NG: NDArray[np.bool_]
    """GPUs that are slow now and then."""
    spell_rate: float
    spell_steps: int
    spell_factor: float
    lasting_NG: Floats
    """How many times as long a GPU takes, for good."""
    drift: float
    """How much slower a GPU gets as it warms up, in the end."""
    drift_s: float


@dataclass(frozen=True)
class Plant:
    """Everything that is true of a cluster and that a searcher does not know."""

    nodes: int
    gpus_per_node: int
    num_images: int
    start_s: float
    cores: Cores
    loading: Loading
    copying: Copying
    computing: Computing
    linking: Linking
    memory: Memory
    trouble: Trouble


@dataclass(frozen=True)
class Setting:
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


def per_point(settings: list[Setting], value: Callable[[Setting], float]) -> Floats:
    """One number a point, shaped P×1×1 to meet N×G."""
    return np.array([value(setting) for setting in settings], dtype=float)[:, None, None]
