"""Training steps one after the other: loader queues that share a node, GPUs, a ring, and a barrier at its end.

A step of rank r begins when a batch is in its queue. The queue is filled by its loader threads, which share the node's cores
(processor sharing) and the storage with those of the other ranks, and stand still while it is full; what a batch asks of them is
the sum of its images' random decode times. The gradients' buckets become ready one after the other during the backward pass, each
is reduced when all ranks have it and the bucket before it is through; the last one ends the step for all ranks at once.

Several points of one GPU count run side by side under the same luck, so that they differ by what they are and not by their noise.
Shapes: T steps, P points, N nodes, G GPUs a node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from tests.benchmarks.simulation.parts import Floats, Plant, Setting, per_point

MEMORY_STEPS = 20
"""How long a node's reading speed remembers."""


@dataclass(frozen=True)
class Luck:
    """The noise of T steps of a whole cluster."""

    work_TNG: Floats
    """Standard normal: a batch's decode time away from its mean."""
    speed_TNG: Floats
    """How many times as long a GPU takes for this step."""
    read_TN: Floats
    link_T: Floats

    @classmethod
    def draw(cls, plant: Plant, steps: int, rng: np.random.Generator) -> Luck:
        trouble, shape = plant.trouble, (steps, plant.nodes, plant.gpus_per_node)
        begins_TNG = (rng.random(shape) < trouble.spell_rate) & trouble.prone_NG
        begun_TNG = np.cumsum(begins_TNG, axis=0)
        recent_TNG = begun_TNG.copy()
        recent_TNG[trouble.spell_steps :] -= begun_TNG[: -trouble.spell_steps]
        speed_TNG = np.exp(
            trouble.step_noise * rng.standard_normal((steps, 1, 1)) + trouble.rank_noise * rng.standard_normal(shape)
        )
        speed_TNG *= trouble.lasting_NG * np.where(recent_TNG > 0, trouble.spell_factor, 1.0)
        keep = 1.0 - 1.0 / MEMORY_STEPS
        white_TN = rng.standard_normal((steps, plant.nodes)) * np.sqrt(1.0 - keep**2)
        white_TN[0] /= np.sqrt(1.0 - keep**2)  # begins as it goes on
        return cls(
            work_TNG=rng.standard_normal(shape),
            speed_TNG=speed_TNG,
            read_TN=np.exp(trouble.read_noise * lfilter([1.0], [1.0, -keep], white_TN, axis=0)),
            link_T=np.exp(trouble.link_noise * rng.standard_normal(steps)),
        )


@dataclass(frozen=True)
class Steps:
    """What a stop watch on the ranks would have seen: wall time of each step, and the ranks' mean of each phase."""

    steps_s_TP: Floats
    phases_s_TP: dict[str, Floats]


def simulate(plant: Plant, settings: list[Setting], luck: Luck, at_s: float = 0.0) -> Steps:
    """Steps of every point from a cold start (empty queues), on GPUs that have been at work for `at_s` seconds already."""
    num_ranks = settings[0].num_workers
    if any(setting.num_workers != num_ranks for setting in settings):
        raise ValueError("points of one GPU count run side by side, not of several")
    gpus = min(num_ranks, plant.gpus_per_node)
    nodes = -(-num_ranks // plant.gpus_per_node)
    here_NG = np.arange(nodes * gpus).reshape(nodes, gpus) < num_ranks
    absent_NG = np.where(here_NG, 0.0, -np.inf)
    work_TNG, speed_TNG = luck.work_TNG[:, :nodes, :gpus], luck.speed_TNG[:, :nodes, :gpus]
    num_steps, num_points = len(work_TNG), len(settings)
    cores, loading, trouble = plant.cores, plant.loading, plant.trouble

    batch_P = per_point(settings, lambda s: s.batch)
    workers_P = per_point(settings, lambda s: s.loader_workers)
    # A batch has no more chunks than this for its threads to take; those of the batches after it can be taken already.
    threads_P = workers_P if loading.whole_batches else np.minimum(workers_P, np.ceil(batch_P / loading.chunk) * loading.depth)
    decode_s_P = per_point(settings, lambda s: loading.decode_s * s.decode)
    group_P = workers_P if loading.whole_batches else np.ones_like(workers_P)
    cap_P = loading.depth * group_P
    spread_P = loading.decode_cv / np.sqrt(batch_P)

    phase_s_P, launching_s_P = _gpu_times(plant, settings)
    copy_s_PN = _copy_times(plant, batch_P[:, 0], here_NG)
    bucket_s, num_buckets = plant.linking.bucket_s(num_ranks, plant.gpus_per_node)
    if num_ranks > 1:
        phase_s_P["backward"] = phase_s_P["backward"] * (1.0 + plant.linking.overlap_cost)
    before_P = phase_s_P["augment"] + phase_s_P["teacher"] + phase_s_P["student"]
    backward_P, launch_before_P, launch_backward_P = phase_s_P["backward"], launching_s_P["before"], launching_s_P["backward"]

    elapsed_P = np.full((num_points, 1, 1), at_s)
    level_PNG = np.zeros((num_points, nodes, gpus))
    active_PNG = np.broadcast_to(here_NG, level_PNG.shape).astype(float)
    mains_N = here_NG.sum(-1) * cores.main_load
    wait_TP, step_TP, early_TP = (np.empty((num_steps, num_points)) for _ in range(3))
    num_here = here_NG.sum()
    for t in range(num_steps):
        # The loader's threads: how many want a core, how much storage is left for each, what a rank gets.
        alone_s = loading.read_latency_s + decode_s_P
        busy_PN = (active_PNG * (threads_P * decode_s_P / alone_s)).sum(-1) + mains_N
        stretch_PN1 = cores.stretch(busy_PN)[..., None]
        wanted_PNG = threads_P / (loading.read_latency_s + decode_s_P * stretch_PN1)
        read_PN = (active_PNG * wanted_PNG).sum(-1) * (loading.image_bytes * loading.uncached)
        given_PN = np.minimum(
            loading.node_bytes_per_s * luck.read_TN[t, :nodes] / np.maximum(read_PN, 1e-9),
            loading.shared_bytes_per_s * luck.read_TN[t, :1] / np.maximum(read_PN.sum(-1, keepdims=True), 1e-9),
        )
        rate_PNG = wanted_PNG * np.minimum(given_PN, 1.0)[..., None] / batch_P  # batches a second
        # Each rank waits for its batch: one that is ready already, or the rest of the group that is being made.
        work_PNG = np.clip(1.0 + spread_P * work_TNG[t], 0.3, 1.9)
        wait_PNG = np.maximum(work_PNG * (group_P - t % group_P) - level_PNG, 0.0) / rate_PNG
        # The GPU; where it waits for the CPU's launches, it does so for longer on busy cores.
        hot_P = 1.0 + trouble.drift * -np.expm1(-elapsed_P / trouble.drift_s)
        slow_PN1 = stretch_PN1 - 1.0
        speed_PNG = speed_TNG[t] * hot_P
        ready_PNG = wait_PNG + copy_s_PN[..., None] + (before_P + launch_before_P * slow_PN1) * speed_PNG + absent_NG
        backward_PNG = (backward_P + launch_backward_P * slow_PN1) * speed_PNG
        # The ring. When buckets are of one size, max over i of (all have bucket i) + (the rest's time) is convex in i:
        # it is found at the first or the last bucket.
        bucket = bucket_s * luck.link_T[t]
        first_P = (ready_PNG + backward_PNG / num_buckets).max((1, 2)) + num_buckets * bucket
        last_P = (ready_PNG + backward_PNG).max((1, 2)) + bucket
        update_P = phase_s_P["optimizer"][:, 0, 0] * speed_TNG[t, 0, 0]
        step_P = np.maximum(first_P, last_P) + update_P
        # The threads have worked for the whole of it, or until the queue was full.
        made_PNG = rate_PNG * step_P[:, None, None]
        room_PNG = np.maximum(cap_P - level_PNG, 0.0)
        level_PNG = level_PNG + np.minimum(made_PNG, np.maximum(room_PNG, wait_PNG * rate_PNG)) - work_PNG
        active_PNG = np.minimum(room_PNG / made_PNG, 1.0) * here_NG
        if trouble.drift:
            elapsed_P = elapsed_P + step_P[:, None, None]
        wait_TP[t] = (wait_PNG * here_NG).sum((1, 2)) / num_here
        early_TP[t] = (speed_PNG * here_NG).sum((1, 2)) / num_here
        step_TP[t] = step_P

    phases = {"data": wait_TP, "h2d": np.broadcast_to(copy_s_PN.mean(-1), step_TP.shape)}
    for phase in ("augment", "teacher", "student"):
        phases[phase] = phase_s_P[phase][:, 0, 0] * early_TP
    phases["optimizer"] = phase_s_P["optimizer"][:, 0, 0] * speed_TNG[:, :1, 0]
    phases["backward"] = np.maximum(step_TP - np.sum(list(phases.values()), axis=0), 0.0)
    return Steps(step_TP, phases)


def _gpu_times(plant: Plant, settings: list[Setting]) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Seconds of each phase on the GPU alone, and how much of them is launching, before and in the backward pass."""
    computing, rows, launching = plant.computing, [], []
    for setting in settings:
        arguments = (setting.batch, computing.launch_s, computing.multiprocessors, setting.speedup)
        teacher_s, teacher_launching_s = computing.teacher.times(*arguments)
        student_s, student_launching_s = computing.student.times(*arguments)
        backward_s, backward_launching_s = computing.backward.times(*arguments)
        augment_s = setting.batch * (computing.augment_image_s + setting.gpu_image_s)
        slowdown = plant.memory.slowdown(plant.memory.peak_mib(setting.batch, setting.memory))
        rows.append([augment_s, teacher_s * slowdown, student_s * slowdown, backward_s * slowdown, computing.optimizer_s])
        launching.append([teacher_launching_s + student_launching_s, backward_launching_s])
    columns = np.array(rows).T[..., None, None]
    phases = dict(zip(("augment", "teacher", "student", "backward", "optimizer"), columns, strict=True))
    return phases, dict(zip(("before", "backward"), np.array(launching).T[..., None, None], strict=True))


def _copy_times(plant: Plant, batch_P1: Floats, here_NG: np.ndarray) -> Floats:
    """Seconds that a rank waits for its batch's copy, P×N: the node's GPUs copy all at once."""
    copying = plant.copying
    speed_N = np.minimum(copying.gpu_bytes_per_s, copying.node_bytes_per_s / here_NG.sum(-1))
    return copying.exposed * batch_P1 * copying.image_bytes / speed_N
