"""Which hardware, networks, data and space a seed stands for. Ranges are those of machines that one can rent or has at hand."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.benchmarks.simulation.parts import (
    Copying,
    Cpu,
    Floats,
    Gpu,
    Heat,
    Jitter,
    Kernels,
    Load,
    Loader,
    Memory,
    Network,
    Plant,
    Storage,
)

KINDS = ("decode", "storage", "compute", "network", "memory")
MIN_POINTS, MAX_POINTS = 320, 700
NUM_KERNELS = 8
FAILURES = 0.03
EXTRAS: dict[str, dict[str, dict[str, float]]] = {
    # What a value changes of a point's `BuildContext`.
    "precision": {
        "fp32": {},
        "bf16": {"speedup": 2.2, "memory": 0.6},
        "fp16": {"speedup": 2.1, "memory": 0.6},
    },
    "data.decoder": {
        "pillow": {"decode": 1.6},
        "simplejpeg": {},
        "nvimagecodec": {"decode": 0.12, "gpu_image_s": 1.2e-4, "memory": 1.1},
    },
}


@dataclass(frozen=True)
class Drawn:
    """A plant and what may be chosen on it."""

    kind: str
    plant: Plant
    space: dict[str, list[Any]]
    reserved: bool
    """A rank reserves a CPU of its own and one for each loader worker: points that ask for more than a node has are refused."""


def draw(seed: int, attempt: int = 0) -> Drawn:
    """The cluster of a seed; a further attempt where one is of no use."""
    rng = np.random.default_rng([seed, 13, attempt])
    kind = KINDS[int(rng.integers(len(KINDS)))]
    nodes = int(rng.choice([1, 1, 2, 2, 3, 4, 4, 6, 8]))
    gpus = int(rng.choice([2, 4, 4, 8, 8] if nodes > 1 else [4, 8, 8]))
    plant = _plant(rng, kind, nodes, gpus)
    reserved = bool(rng.random() < 0.5)
    while True:
        space = _space(rng, kind, plant)
        if MIN_POINTS <= math.prod(map(len, space.values())) <= MAX_POINTS:
            return Drawn(kind, plant, space, reserved)


def draw_tenant(seed: int, plant: Plant, whole_s: float) -> tuple[Load, tuple[tuple[float, float], ...]] | None:
    """What another tenant takes, in half of the clusters, and when; `whole_s` is how long measuring everything would last.

    It comes while a search of a tenth of that is likely to be under way, stays for a while, and may come again.
    """
    rng = np.random.default_rng([seed, 14])
    if rng.random() < 0.5:
        return None
    visited_N = rng.random(plant.nodes) < rng.uniform(0.3, 1.0)
    visited_N[int(rng.integers(plant.nodes))] = True
    busy = plant.cpu.threads * (rng.uniform(0.3, 1.0) if rng.random() < 0.8 else 0.05)
    busy_N: Floats = np.where(visited_N, busy, 0.0)
    gpu_NG = np.ones((plant.nodes, plant.gpus_per_node))
    if rng.random() < 0.5:
        shared_NG = visited_N[:, None] & (rng.random(gpu_NG.shape) < 0.5)
        gpu_NG[shared_NG] = rng.uniform(1.15, 1.8)
    storage = rng.uniform(0.15, 0.7) if rng.random() < 0.8 else 1.0
    links = rng.uniform(0.2, 0.7) if rng.random() < 0.8 else 1.0
    times, at_s = [], whole_s * _log(rng, 0.004, 0.06)
    for _ in range(6):
        stays_s = whole_s * _log(rng, 0.01, 0.1)
        times.append((at_s, at_s + stays_s))
        at_s += stays_s + whole_s * _log(rng, 0.01, 0.1)
    return Load(busy_N, storage, links, gpu_NG), tuple(times)


def _log(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _plant(rng: np.random.Generator, kind: str, nodes: int, gpus: int) -> Plant:
    photos = bool(rng.random() < 0.7)
    # GPU seconds an image, forward through the student; the teacher's is a multiple.
    student_image_s = _log(rng, 8e-5, 6e-4) * (3.0 if kind == "compute" else 1.0)
    gpu = _gpu(rng, student_image_s)
    passes = (gpu.student, gpu.backward, gpu.teacher)
    image_s = sum(kernels.times(64, gpu.launch_s, gpu.multiprocessors, 1.0)[0] / 64 for kernels in passes)
    # CPU seconds an image, and cores for it: a decode-bound cluster has too few of them, another one has about enough.
    decode_s = _log(rng, 2.5e-3, 1.2e-2) if photos else _log(rng, 1.5e-4, 6e-4)
    supply = rng.uniform(0.2, 0.8) if kind == "decode" else rng.uniform(0.9, 4.0)
    cores = int(np.clip(round(gpus * (1 + supply * decode_s / image_s)), 2 * gpus if kind != "decode" else gpus + 1, 16 * gpus))
    # No more and no fewer cores than are built into a machine: the images make up for it.
    supplied_s = cores / gpus / supply * image_s
    decode_s = supplied_s if kind == "decode" else min(decode_s, supplied_s)
    image_bytes = _log(rng, 6e4, 1.6e5) if photos else _log(rng, 1.5e3, 4e3)
    needed_bytes_per_s = gpus / image_s * image_bytes
    starved = kind == "storage"
    storage = Storage(
        latency_s=_log(rng, 1e-4, 8e-3) if photos else _log(rng, 5e-6, 3e-4),
        image_bytes=image_bytes,
        node_bytes_per_s=needed_bytes_per_s * (_log(rng, 0.4, 3.0) if starved else _log(rng, 1.2, 10.0)),
        shared_bytes_per_s=needed_bytes_per_s * nodes * (_log(rng, 0.25, 0.9) if starved else _log(rng, 0.9, 10.0)),
        uncached=float(rng.choice([1.0, rng.uniform(0.1, 0.9)])),
        stalls=_log(rng, 1e-6, 5e-5) * (3.0 if starved else 1.0),
        stall_s=(0.01 + 64 * image_s) * _log(rng, 0.3, 3.0),
        tail=rng.uniform(1.3, 2.5),
    )
    loader = Loader(
        decode_s=decode_s,
        decode_cv=rng.uniform(0.3, 0.9),
        lock_share=float(rng.choice([0.0, rng.uniform(0.0, 0.08)])),
        chunk=int(rng.choice([1, 4, 8, 16])),
        whole_batches=bool(rng.random() < 0.2),
        prefetch=int(rng.choice([2, 2, 3, 4])),
    )
    pixels = 3 * (224**2 if photos else 32**2)
    gpu_mib = float(rng.choice([8, 11, 16, 24, 40, 80])) * 1024
    fixed_mib = rng.uniform(1200, 3500)
    # The batch that fills a GPU: small where memory is what binds.
    full = _log(rng, 24, 96) if kind == "memory" else _log(rng, 128, 1000)
    across_nodes = _log(rng, 3e8, 2.5e9) if kind == "network" else _log(rng, 1e9, 2.5e10)
    inside = _log(rng, 1.5e9, 6e9) if kind == "network" or rng.random() < 0.4 else _log(rng, 8e9, 1.2e11)
    sockets = 2 if gpus >= 4 and rng.random() < 0.6 else 1
    network = Network(
        gradient_bytes=4e6 * (_log(rng, 40, 150) if kind == "network" else _log(rng, 5, 60)),
        bucket_bytes=float(rng.choice([1e7, 2.5e7, 5e7])),
        socket_gpus=gpus // sockets,
        inside_bytes_per_s=inside,
        across_sockets_bytes_per_s=inside * rng.uniform(0.4, 0.9),
        between_nodes_bytes_per_s=min(across_nodes, inside),
        inside_latency_s=_log(rng, 4e-6, 1.5e-5),
        between_latency_s=_log(rng, 1.5e-5, 8e-5),
        overlap_cost=rng.uniform(0.0, 0.08),
    )
    return Plant(
        nodes=nodes,
        gpus_per_node=gpus,
        num_images=1_281_167 if photos else 50_000,
        start_s=rng.uniform(10.0, 40.0),
        setup_s=rng.uniform(0.5, 2.5),
        cpu=Cpu(cores, bool(rng.random() < 0.7), sockets, rng.uniform(0.1, 0.4), rng.uniform(0.4, 0.9)),
        loader=loader,
        storage=storage,
        copying=Copying(pixels, 1.2e10, _log(rng, 6e9, 5e10), exposed=float(rng.choice([1.0, 0.1]))),
        gpu=gpu,
        network=network,
        memory=Memory(
            fixed_mib,
            (gpu_mib - fixed_mib) / full,
            gpu_mib,
            workspace_mib=0.02 * gpu_mib * rng.random(),
            pressure=float(rng.choice([0.0, 0.0, 0.06, 0.15])),
            seed=int(rng.integers(2**31)),
        ),
        heat=_heat(rng, nodes, gpus),
        jitter=_jitter(rng, nodes, gpus),
        failures=FAILURES,
    )


def _gpu(rng: np.random.Generator, student_image_s: float) -> Gpu:
    multiprocessors = int(rng.choice([46, 68, 80, 108, 132]))
    student = _kernels(rng, student_image_s, multiprocessors)
    return Gpu(
        launch_s=_log(rng, 5e-6, 2.5e-5),
        multiprocessors=multiprocessors,
        student=student,
        backward=replace(student, counts_K=2 * student.counts_K),
        teacher=_kernels(rng, student_image_s * rng.uniform(1.0, 3.5), multiprocessors),
        augment_image_s=_log(rng, 2e-6, 3e-5),
        optimizer_s=_log(rng, 1e-3, 8e-3),
        odd_batch_loss=float(rng.choice([0.0, rng.uniform(0.05, 0.25)])),
        algorithm_spread=rng.uniform(0.0, 0.05),
        seed=int(rng.integers(2**31)),
    )


def _kernels(rng: np.random.Generator, image_s: float, multiprocessors: int) -> Kernels:
    """Kernels that take `image_s` an image together in a large batch: some cover the GPU with few images, some do not."""
    share_K = rng.dirichlet(np.full(NUM_KERNELS, 0.8))
    counts_K = rng.integers(2, 14, NUM_KERNELS).astype(float)
    tiles_K: Floats = np.exp(rng.uniform(np.log(0.2), np.log(8.0), NUM_KERNELS))
    return Kernels(counts_K, tiles_K, image_s * share_K * multiprocessors / (counts_K * tiles_K))


def _heat(rng: np.random.Generator, nodes: int, gpus: int) -> Heat:
    """In six of ten clusters GPUs throttle, some of them more: those at the top of the rack."""
    throttle_NG = np.zeros((nodes, gpus))
    if rng.random() < 0.6:
        throttle_NG = rng.uniform(0.02, 0.12) * rng.uniform(0.3, 1.7, (nodes, gpus))
    return Heat(throttle_NG, threshold=rng.uniform(0.3, 0.7), constant_s=_log(rng, 30.0, 200.0))


def _jitter(rng: np.random.Generator, nodes: int, gpus: int) -> Jitter:
    lasting_NG = np.exp(0.01 * rng.standard_normal((nodes, gpus)))
    if rng.random() < 0.25:
        lasting_NG[int(rng.integers(nodes)), int(rng.integers(gpus))] *= rng.uniform(1.08, 1.5)
    elif rng.random() < 0.1:
        lasting_NG[int(rng.integers(nodes))] *= rng.uniform(1.05, 1.3)
    return Jitter(
        step_noise=_log(rng, 0.02, 0.15),
        rank_noise=rng.uniform(0.005, 0.03),
        spike_rate=float(rng.choice([0.0, _log(rng, 2e-4, 4e-3)])),
        spike=rng.uniform(0.2, 1.0),
        read_noise=rng.uniform(0.05, 0.3),
        link_noise=rng.uniform(0.05, 0.25),
        lasting_NG=lasting_NG,
    )


def _space(rng: np.random.Generator, kind: str, plant: Plant) -> dict[str, list[Any]]:
    nodes, gpus = plant.nodes, plant.gpus_per_node
    total = nodes * gpus
    candidates = sorted(
        {n for n in (1, 2, 3, 4, 6, 8, gpus, total // 2, *(gpus * k for k in range(1, nodes + 1))) if 0 < n <= total}
    )
    num_counts = min(len(candidates), int(rng.integers(3, 8)))
    counts = sorted({total, *(int(n) for n in rng.choice(candidates, num_counts, replace=False))})
    fills = (plant.memory.gpu_mib - plant.memory.fixed_mib) / plant.memory.image_mib
    # Batches are chosen to fill the GPUs, or no larger than what a network still learns well from.
    if kind == "memory" or rng.random() < 0.35:
        highest = total * fills * (_log(rng, 0.8, 2.5) if kind == "memory" else _log(rng, 0.3, 1.1))
    else:
        highest = max(total * min(_log(rng, 6, 96), fills), 48.0)
    if rng.random() < 0.15:  # somebody has tried out what just fits
        highest = total * fills * rng.uniform(0.96, 1.0)
    num_batches = int(rng.integers(5, 15))
    if rng.random() < 0.4:  # powers of two, as most people write them
        top = int(math.log2(highest))
        batches = [float(2**power) for power in range(max(top - num_batches + 1, 3), top + 1)]
    else:
        batches = list(np.exp(np.linspace(np.log(highest / _log(rng, 4, 40)), np.log(highest), num_batches)))
    step = 8 if highest > 64 else 1
    num_loaders = int(rng.integers(5, 10))
    loaders = rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 12, 16], num_loaders, replace=False)
    space: dict[str, list[Any]] = {
        "scale.num_workers": counts,
        "data.global_batch_size": sorted({max(total, round(b / step) * step) for b in batches}),
        "data.loader_workers": sorted(int(w) for w in loaders),
    }
    if rng.random() < 0.4:
        key = str(rng.choice(list(EXTRAS)))
        names = list(EXTRAS[key])
        chosen = set(itertools.islice((names[i] for i in rng.permutation(len(names))), int(rng.integers(2, len(names) + 1))))
        space[key] = [name for name in names if name in chosen]
    return space
