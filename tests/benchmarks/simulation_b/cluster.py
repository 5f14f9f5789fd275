"""What a simulated cluster consists of, and how one is drawn.

GPUs are as in their vendor's data sheets but for their arithmetic, models as in the tables of torchvision and timm; bandwidths
are what nccl-tests reports ("bus bandwidth") rather than what a link is called; prices are of the order that clouds ask.
"""

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Point:
    """One configuration that can be measured."""

    num_workers: int
    global_batch_size: int
    loader_workers: int
    precision: str = "fp32"


@dataclass(frozen=True)
class Gpu:
    """TFLOP/s, memory in GiB, its GB/s, L2 in MB, SMs, $/h, GB/s between GPUs of a node (PCIe or NVLink).

    TFLOP/s are less than tensor cores' peaks, which ResNet's layers cannot feed, and more than V100's fp32 units', thanks to
    Winograd; a test compares with published training speeds. fp32 is TF32 on A100 and H100; bf16 is 0 if there is none.
    """

    name: str
    fp32: float
    bf16: float
    memory_gib: float
    bandwidth: float
    l2_mb: float
    num_sms: int
    price: float
    intra_gb_s: tuple[float, ...]


GPUS = (
    Gpu("T4", 7, 0, 15, 300, 4, 40, 0.4, (5, 10)),
    Gpu("V100", 21, 0, 16, 900, 6, 80, 2.5, (10, 130)),
    Gpu("RTX 3090", 25, 46, 24, 936, 6, 82, 0.5, (8, 18)),
    Gpu("A10G", 23, 40, 23, 600, 6, 80, 1.0, (10, 20)),
    Gpu("A100", 55, 190, 40, 1555, 40, 108, 3.0, (20, 230)),
    Gpu("H100", 150, 430, 80, 3350, 50, 132, 4.5, (40, 370)),
)


@dataclass(frozen=True)
class Model:
    """Forward GFLOPs, parameters (millions), activations (MB an image, fp32), kernels, 128×128 output tiles an image by stage."""

    name: str
    gflops: float
    params_m: float
    activation_mb: float
    num_kernels: int
    tiles: tuple[float, ...]


# A student with a teacher that is often paired with it; the first two are of 32×32 images.
PAIRS = (
    (Model("WRN-16-2", 0.2, 0.7, 9, 110, (8, 2, 1)), Model("WRN-40-2", 0.66, 2.2, 20, 260, (8, 2, 1))),
    (Model("ResNet8x4", 0.36, 1.2, 8, 60, (8, 4, 2)), Model("ResNet32x4", 2.2, 7.4, 30, 220, (8, 4, 2))),
    (Model("ResNet-18", 3.6, 11.7, 25, 125, (25, 6, 3, 2)), Model("ResNet-34", 7.3, 21.8, 38, 220, (25, 6, 3, 2))),
    (Model("MobileNetV2", 0.6, 3.5, 75, 310, (49, 12, 3, 1)), Model("ResNet-50", 8.2, 25.6, 86, 320, (49, 24, 12, 6))),
    (Model("ResNet-50", 8.2, 25.6, 86, 320, (49, 24, 12, 6)), Model("ResNet-152", 23, 60.2, 180, 930, (49, 24, 12, 6))),
    (Model("DeiT-Ti", 2.5, 5.7, 30, 330, (5, 2, 6)), Model("RegNetY-16GF", 32, 83.6, 170, 500, (60, 30, 20, 10))),
    (Model("DeiT-S", 9.2, 22, 62, 330, (9, 5, 18)), Model("ViT-L/16", 123, 304, 420, 660, (24, 12, 50))),
    (Model("ViT-B/16", 35, 86.6, 135, 330, (18, 9, 36)), Model("ViT-B/16", 35, 86.6, 135, 330, (18, 9, 36))),
)
CACHED_TEACHER = Model("outputs computed before", 0, 0, 0, 4, (1,))
GPU_WEIGHTS = (0.1, 0.2, 0.15, 0.15, 0.25, 0.15)
# Storage: bytes/s, seconds a read, over all nodes or in each, and how many reads in ten thousand stall (Dean & Barroso 2013).
STORES = {
    "nvme": (2.5e9, 1e-4, False, 0.01),
    "sata_ssd": (4.5e8, 2e-4, False, 0.05),
    "hdd": (1.4e8, 2e-3, False, 0.5),
    "nfs": (6e8, 1.5e-3, True, 1.0),
    "lustre": (5e9, 1e-3, True, 0.3),
    "object_store": (2e9, 2e-2, True, 2.0),
}
# Between nodes: bytes/s of a node, seconds a message. Sockets have ten times the latency of RDMA.
LINKS = {
    "1GbE": (1.15e8, 5e-5),
    "10GbE": (1.1e9, 4e-5),
    "25GbE": (2.7e9, 3e-5),
    "100G RoCE": (1.1e10, 8e-6),
    "4xHDR": (8.5e10, 6e-6),
}
WORKER_AXES = {
    (320, 8): (1, 2, 4, 6, 8),
    (320, 12): (1, 3, 6, 9, 12),
    (320, 16): (1, 2, 4, 8, 16),
    (700, 8): (1, 2, 3, 4, 5, 6, 8),
    (700, 12): (1, 2, 3, 4, 6, 9, 12),
    (700, 16): (1, 2, 4, 6, 8, 12, 16),
}
LOADER_AXES = {4: (1, 2, 4, 8), 7: (1, 2, 3, 4, 6, 8, 12), 8: (1, 2, 3, 4, 6, 8, 12, 16), 10: (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)}


@dataclass(frozen=True)
class Tenant:
    """Somebody else's jobs: how long they run and pause on average, and what they leave of storage, network and CPU."""

    busy_s: float
    pause_s: float
    storage: float
    network: float
    cpu: float

    @property
    def busy_fraction(self) -> float:
        return self.busy_s / (self.busy_s + self.pause_s)


@dataclass(frozen=True)
class Cluster:
    """One cluster with one training on it. Tuples by rank have an entry a GPU, in the order in which ranks fill nodes."""

    seed: int
    points: tuple[Point, ...]
    gpu: Gpu
    student: Model
    teacher: Model
    store: str
    link: str
    gpus_per_node: int
    rank_gpu_speed: tuple[float, ...]
    rank_cpu_speed: tuple[float, ...]
    cores: int  # physical ones of a node
    sockets: int
    smt_gain: float  # what the second hyperthread of a core adds
    decode_s: float  # CPU seconds an image, augmentation included
    image_bytes: float
    dataset_images: int
    cache_fraction: float  # of the data set that a node's page cache holds
    intra_bytes_s: float
    flops_fraction: float  # of the GPU's TFLOP/s that full waves reach
    kernel_spread: float  # deviation of the logarithm of speed between batch sizes
    launch_s: float  # CPU seconds a kernel
    python_s: float  # CPU seconds of the loop a step, launches apart
    optimizer_states: int  # tensors of the parameters' size: 1 (SGD) or 2 (Adam)
    fragmentation: float  # by which memory grows in a long run
    jitter: float  # deviation of the logarithm of a rank's compute time
    outliers: float  # fraction of a rank's steps that are much slower
    load_jitter: float
    hiccup_every_s: float  # between pauses of the whole job: Python's GC, others' checkpoints on shared storage
    hiccup_s: float
    throttle: float  # share of the clock rate that a hot GPU loses
    heat_s: float  # time constant of heating and cooling
    startup_s: float
    failure: float  # chance of a worker to die in a trial
    tenant: Tenant | None


def draw_cluster(seed: int, size: int = 320) -> Cluster:
    """The cluster of a seed, with a grid of exactly `size` points: 320 or 700."""
    rng = np.random.default_rng([seed, size])
    gpu = GPUS[rng.choice(len(GPUS), p=GPU_WEIGHTS)]
    student, teacher = PAIRS[rng.integers(len(PAIRS))]
    if rng.random() < 0.35:
        teacher = CACHED_TEACHER
    small = student.activation_mb < 10  # images of 32×32 pixels
    num_gpus = int(rng.choice((8, 12, 16), p=(0.35, 0.2, 0.45)))
    gpus_per_node = int(rng.choice((1, 2, 4, 8), p=(0.1, 0.2, 0.4, 0.3)))
    num_nodes = -(-num_gpus // gpus_per_node)
    # In some clusters, the last nodes are older in their GPUs, CPUs or both (Gavel, Narayanan et al. 2020).
    is_old = np.arange(num_gpus) // gpus_per_node >= rng.integers(1, max(2, num_nodes))
    old_gpu = rng.uniform(0.45, 0.9) if rng.random() < 0.2 else 1.0
    old_cpu = rng.uniform(0.45, 0.9) if rng.random() < 0.2 else 1.0
    # GPUs of one kind differ by some per cent, and a few by much more (Sinha et al., "Not all GPUs are created equal", SC 2022).
    gpu_speed = rng.normal(1, rng.uniform(0.002, 0.02), num_gpus) * np.where(is_old, old_gpu, 1)
    if rng.random() < 0.15:
        gpu_speed[rng.integers(num_gpus)] *= rng.uniform(0.75, 0.95)
    return Cluster(
        seed=seed,
        points=_grid(rng, size, num_gpus, small, with_precision=gpu.bf16 > 0 and rng.random() < 0.5),
        gpu=gpu,
        student=student,
        teacher=teacher,
        store=str(rng.choice(list(STORES), p=(0.35, 0.15, 0.1, 0.15, 0.15, 0.1))),
        link=str(rng.choice(list(LINKS), p=(0.15, 0.25, 0.25, 0.25, 0.1))),
        gpus_per_node=gpus_per_node,
        rank_gpu_speed=tuple(gpu_speed.tolist()),
        rank_cpu_speed=tuple(np.where(is_old, old_cpu, 1.0).tolist()),
        cores=gpus_per_node * int(rng.choice((2, 3, 4, 6, 8, 12))),
        sockets=2 if gpus_per_node >= 4 else 1,
        smt_gain=rng.uniform(0.1, 0.35),
        decode_s=1 / rng.uniform(4e3, 2e4) if small else 1 / np.exp(rng.uniform(np.log(80), np.log(900))),
        image_bytes=rng.uniform(2e3, 3e3) if small else rng.uniform(4e4, 3e5),
        dataset_images=50_000 if small else int(rng.choice((130_000, 1_281_167))),
        cache_fraction=1.0 if small else float(rng.choice((0.1, 0.35, 0.65, 1.0))),
        intra_bytes_s=rng.choice(gpu.intra_gb_s) * 1e9,
        flops_fraction=rng.uniform(0.3, 0.6),
        kernel_spread=rng.uniform(0, 0.05),
        launch_s=rng.uniform(6e-6, 2e-5),
        python_s=rng.uniform(1e-3, 5e-3),
        optimizer_states=int(rng.choice((1, 2))),
        fragmentation=float(rng.choice((0, 0.02, 0.05, 0.1))),
        jitter=rng.uniform(0.003, 0.03),
        outliers=rng.uniform(0, 0.006),
        load_jitter=rng.uniform(0.05, 0.3),
        hiccup_every_s=rng.uniform(20, 180),
        hiccup_s=rng.uniform(0, 1.5),
        throttle=rng.uniform(0, 0.12),
        heat_s=rng.uniform(40, 200),
        startup_s=rng.uniform(10, 40),
        failure=rng.uniform(0, 0.004),
        tenant=_tenant(rng) if rng.random() < 0.4 else None,
    )


def _tenant(rng: np.random.Generator) -> Tenant:
    return Tenant(rng.uniform(120, 600), rng.uniform(600, 3600), *rng.uniform((0.25, 0.4, 0.6), (0.8, 0.9, 0.95)).tolist())


def _grid(rng: np.random.Generator, size: int, num_gpus: int, small: bool, *, with_precision: bool) -> tuple[Point, ...]:
    num_batches = {320: 8, 700: 10}[size]
    workers = WORKER_AXES[320 if with_precision else size, num_gpus]
    precisions = ("fp32", "bf16") if with_precision else ("fp32",)
    smallest = int(rng.choice((64, 128) if small else (16, 32, 64)))
    if rng.random() < 0.3:  # every power of two and what is halfway between: 64, 96, 128, 192 …
        batches = [smallest * 2 * 2 ** (k // 2) * (2 + k % 2) // 2 for k in range(num_batches)]
    else:
        batches = [smallest * 2**k for k in range(num_batches)]
    loaders = LOADER_AXES[size // (len(workers) * num_batches * len(precisions))]
    return tuple(Point(*values) for values in itertools.product(workers, batches, loaders, precisions))
