"""Which hardware, networks, data and space a seed stands for. Ranges are those of machines that one can rent or has at hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.benchmarks.simulation.parts import (
    Computing,
    Copying,
    Cores,
    Kernels,
    Linking,
    Loading,
    Memory,
    Plant,
    Trouble,
)

KINDS = ("decode", "compute", "network", "memory")
MIN_POINTS, MAX_POINTS = 60, 600
NUM_KERNELS = 12
EXTRAS: dict[str, dict[str, dict[str, float]]] = {
    # What a value changes of a point's `Setting`.
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
    """A rank reserves a CPU of its own and one for each loader thread: points that ask for more than a node has are refused."""


def draw(seed: int, attempt: int = 0) -> Drawn:
    """The cluster of a seed; a further attempt where one is of no use."""
    rng = np.random.default_rng([seed, 5, attempt])
    kind = KINDS[int(rng.integers(len(KINDS)))]
    nodes = int(rng.choice([1, 1, 2, 3, 4, 6, 8, 12, 16]))
    gpus = int(rng.choice([1, 2, 3, 4, 4, 6, 8, 8] if nodes > 1 or rng.random() < 0.15 else [2, 4, 6, 8]))
    plant = _plant(rng, kind, nodes, gpus)
    reserved = bool(rng.random() < 0.5)
    while True:
        space = _space(rng, kind, plant)
        if MIN_POINTS <= math.prod(map(len, space.values())) <= MAX_POINTS:
            return Drawn(kind, plant, space, reserved)


def _log(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _plant(rng: np.random.Generator, kind: str, nodes: int, gpus: int) -> Plant:
    photos = bool(rng.random() < 0.7)
    # GPU seconds an image, forward through the student; the teacher's is a multiple.
    student_image_s = _log(rng, 8e-5, 6e-4) * (3.0 if kind == "compute" else 1.0)
    teacher = rng.uniform(1.0, 3.5)
    multiprocessors = int(rng.choice([46, 68, 80, 108, 132]))
    launch_s = _log(rng, 5e-6, 2.5e-5)
    student = _kernels(rng, student_image_s, multiprocessors)
    computing = Computing(
        launch_s=launch_s,
        multiprocessors=multiprocessors,
        student=student,
        backward=replace(student, counts_K=2 * student.counts_K),
        teacher=_kernels(rng, student_image_s * teacher, multiprocessors),
        augment_image_s=_log(rng, 2e-6, 3e-5),
        optimizer_s=_log(rng, 1e-3, 8e-3),
    )
    image_s = sum(
        kernels.times(32, launch_s, multiprocessors, 1.0)[0] / 32
        for kernels in (computing.student, computing.backward, computing.teacher)
    )
    # CPU seconds an image, and cores for it: a decode-bound cluster has too few of them, another one has about enough.
    decode_s = _log(rng, 2.5e-3, 1.2e-2) if photos else _log(rng, 1.5e-4, 6e-4)
    supply = rng.uniform(0.15, 0.7) if kind == "decode" else rng.uniform(0.9, 4.0)
    smt_gain = float(rng.choice([0.0, 0.25, 0.35]))
    cores = int(np.clip(round(gpus * (1 + supply * decode_s / image_s)), 2 * gpus if kind != "decode" else gpus + 1, 16 * gpus))
    # No more and no fewer cores than are built into a machine: the images make up for it.
    supplied_s = cores / gpus / supply * image_s
    decode_s = supplied_s if kind == "decode" else min(decode_s, supplied_s)
    image_bytes = _log(rng, 6e4, 1.6e5) if photos else _log(rng, 1.5e3, 4e3)
    needed_bytes_per_s = gpus / image_s * image_bytes
    starved = kind == "decode" and rng.random() < 0.3  # by storage rather than by cores
    loading = Loading(
        decode_s=decode_s,
        decode_cv=rng.uniform(0.3, 0.9),
        read_latency_s=_log(rng, 2e-5, 5e-3) if photos else _log(rng, 5e-6, 3e-4),
        image_bytes=image_bytes,
        node_bytes_per_s=needed_bytes_per_s * (rng.uniform(0.3, 0.8) if starved else _log(rng, 1.2, 10.0)),
        shared_bytes_per_s=needed_bytes_per_s * nodes * _log(rng, 0.5 if starved else 0.9, 10.0),
        uncached=float(rng.choice([1.0, 1.0, rng.uniform(0.2, 0.9)])),
        depth=int(rng.choice([2, 2, 3, 4])),
        chunk=int(rng.choice([1, 4, 8, 16])),
        whole_batches=bool(rng.random() < 0.3),
    )
    pixels = 3 * (224**2 if photos else 32**2)
    gpu_mib = float(rng.choice([8, 11, 16, 24, 40])) * 1024
    fixed_mib = rng.uniform(1500, 4500)
    # The batch that fills a GPU: small where memory is what binds.
    full = _log(rng, 24, 96) if kind == "memory" else _log(rng, 128, 700)
    across_nodes = _log(rng, 3e8, 2.5e9) if kind == "network" else _log(rng, 3e9, 2.5e10)
    inside = _log(rng, 1.5e9, 6e9) if kind == "network" or rng.random() < 0.4 else _log(rng, 8e9, 1.2e11)
    linking = Linking(
        gradient_bytes=4e6 * (_log(rng, 40, 150) if kind == "network" else _log(rng, 5, 60)),
        bucket_bytes=float(rng.choice([1e7, 2.5e7, 5e7])),
        socket_gpus=gpus if rng.random() < 0.5 else max(1, gpus // 2),
        bytes_per_s=(inside, inside * rng.uniform(0.4, 0.9), min(across_nodes, inside)),
        latency_s=(_log(rng, 4e-6, 1.5e-5), _log(rng, 1e-5, 2.5e-5), _log(rng, 1.5e-5, 8e-5)),
        overlap_cost=rng.uniform(0.0, 0.08),
    )
    return Plant(
        nodes=nodes,
        gpus_per_node=gpus,
        num_images=1_281_167 if photos else 50_000,
        start_s=rng.uniform(10.0, 40.0),
        cores=Cores(cores, smt_gain, main_load=rng.uniform(0.4, 0.9)),
        loading=loading,
        copying=Copying(pixels, 1.2e10, _log(rng, 6e9, 5e10), exposed=float(rng.choice([1.0, 0.1]))),
        computing=computing,
        linking=linking,
        memory=Memory(fixed_mib, (gpu_mib - fixed_mib) / full, gpu_mib, pressure=float(rng.choice([0.0, 0.0, 0.06, 0.15]))),
        trouble=_trouble(rng, nodes, gpus),
    )


def _kernels(rng: np.random.Generator, image_s: float, multiprocessors: int) -> Kernels:
    """Kernels that take `image_s` an image together in a large batch: some cover the GPU with few images, some do not."""
    share_K = rng.dirichlet(np.full(NUM_KERNELS, 1.5))
    counts_K = rng.integers(2, 14, NUM_KERNELS).astype(float)
    tiles_K = np.exp(rng.uniform(np.log(1.0), np.log(40.0), NUM_KERNELS))
    return Kernels(counts_K, tiles_K, image_s * share_K * multiprocessors / (counts_K * tiles_K))


def _trouble(rng: np.random.Generator, nodes: int, gpus: int) -> Trouble:
    lasting_NG = np.exp(0.01 * rng.standard_normal((nodes, gpus)))
    if rng.random() < 0.25:
        lasting_NG[int(rng.integers(nodes)), int(rng.integers(gpus))] *= rng.uniform(1.08, 1.5)
    elif rng.random() < 0.1:
        lasting_NG[int(rng.integers(nodes))] *= rng.uniform(1.05, 1.3)
    drifts = rng.random() < 0.2
    return Trouble(
        step_noise=0.05,
        rank_noise=0.01,
        read_noise=rng.uniform(0.05, 0.3),
        link_noise=rng.uniform(0.05, 0.25),
        prone_NG=rng.random((nodes, gpus)) < 0.1,
        spell_rate=0.02,
        spell_steps=5,
        spell_factor=rng.uniform(1.2, 2.0),
        lasting_NG=lasting_NG,
        drift=rng.uniform(0.03, 0.13) if drifts else 0.0,
        drift_s=rng.uniform(200.0, 1200.0),
    )


def _space(rng: np.random.Generator, kind: str, plant: Plant) -> dict[str, list[Any]]:
    nodes, gpus = plant.nodes, plant.gpus_per_node
    total = nodes * gpus
    candidates = sorted(
        {n for n in (1, 2, 3, 4, 6, 8, gpus, total // 2, *(gpus * k for k in range(1, nodes + 1))) if 0 < n <= total}
    )
    num_counts = min(len(candidates), int(rng.integers(2, 8)))
    counts = sorted({total, *(int(n) for n in rng.choice(candidates, num_counts, replace=False))})
    fills = (plant.memory.gpu_mib - plant.memory.fixed_mib) / plant.memory.image_mib
    # Batches are chosen to fill the GPUs, or no larger than what a network still learns well from.
    if kind == "memory" or rng.random() < 0.35:
        highest = total * fills * (_log(rng, 0.8, 2.5) if kind == "memory" else _log(rng, 0.3, 1.1))
    else:
        highest = max(total * min(_log(rng, 6, 96), fills), 48.0)
    lowest = highest / _log(rng, 4, 40)
    num_batches = int(rng.integers(4, 13))
    batches = np.exp(np.linspace(np.log(lowest), np.log(highest), num_batches))
    step = 8 if highest > 64 else 1
    num_loaders = int(rng.integers(4, 9))
    loaders = rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 12, 16], num_loaders, replace=False)
    space: dict[str, list[Any]] = {
        "scale.num_workers": counts,
        "data.global_batch_size": sorted({max(total, round(b / step) * step) for b in batches}),
        "data.loader_workers": sorted(int(w) for w in loaders),
    }
    if rng.random() < 0.4:
        key = str(rng.choice(list(EXTRAS)))
        names = list(EXTRAS[key])
        kept = set(itertools.islice((names[i] for i in rng.permutation(len(names))), int(rng.integers(2, len(names) + 1))))
        space[key] = [name for name in names if name in kept]
    return space
