"""Training steps one after the other, as recursions of maxima and sums: loader queues, GPUs, an all-reduce that ends the step.

Batch k of a rank is begun by a loader worker that is free (it made batch k − S, S being how many batches are made at a time) when
the queue has room (batch k − S·prefetch was taken), and is ready when it is read and decoded. The rank takes it when it is ready
and the step before is over: begun = max(made, taken), taken = max(over, ready). Threads share a node's cores, and readers the
storage, by how busy they were in the steps before. Gradients' buckets become ready one after the other during the backward pass,
each is reduced when all ranks have it and the bucket before it is through; the last one ends the step for all ranks at once.

Several points of one GPU count run side by side under the same luck, so that they differ by what they are and not by their noise.
Shapes: T steps, P points, N nodes, G GPUs a node, H batches that are remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from tests.benchmarks.simulation.parts import LONGEST_SPIKE, LONGEST_STALL, BuildContext, Floats, Load, Plant, per_point

MEMORY_STEPS = 20
"""How long a node's reading speed remembers."""
BUSY_GAIN = 0.2
"""How fast what is known of the loader workers' load follows them."""
RESTING_GAIN = 0.1
"""How fast a GPU takes on its last warmth where only that matters."""


@dataclass(frozen=True)
class Luck:
    """The noise of T steps of a whole cluster."""

    work_TNG: Floats
    """Standard normal: a batch's decode time away from its mean."""
    speed_TNG: Floats
    """How many times as long a GPU takes for this step."""
    chance_TNG: Floats
    """Uniform: whether a batch's reader stalls."""
    stall_s_TNG: Floats
    """For how long, if it does."""
    read_TN: Floats
    link_T: Floats

    @classmethod
    def draw(cls, plant: Plant, steps: int, rng: np.random.Generator) -> Luck:
        jitter, shape = plant.jitter, (steps, plant.nodes, plant.gpus_per_node)
        speed_TNG = np.exp(
            jitter.step_noise * rng.standard_normal((steps, 1, 1)) + jitter.rank_noise * rng.standard_normal(shape)
        )
        spikes_TNG = jitter.spike * np.minimum(1.0 + rng.pareto(2.0, shape), LONGEST_SPIKE)
        speed_TNG += np.where(rng.random(shape) < jitter.spike_rate, spikes_TNG, 0.0)
        keep = 1.0 - 1.0 / MEMORY_STEPS
        white_TN = rng.standard_normal((steps, plant.nodes)) * np.sqrt(1.0 - keep**2)
        white_TN[0] /= np.sqrt(1.0 - keep**2)  # begins as it goes on
        return cls(
            work_TNG=rng.standard_normal(shape),
            speed_TNG=speed_TNG * jitter.lasting_NG,
            chance_TNG=rng.random(shape),
            stall_s_TNG=plant.storage.stall_s * np.minimum(1.0 + rng.pareto(plant.storage.tail, shape), LONGEST_STALL),
            read_TN=np.exp(jitter.read_noise * lfilter([1.0], [1.0, -keep], white_TN, axis=0)),
            link_T=np.exp(jitter.link_noise * rng.standard_normal(steps)),
        )


@dataclass(frozen=True)
class Steps:
    """What a stop watch on the ranks would have shown: wall time of each step, and the ranks' mean of each phase."""

    steps_s_TP: Floats
    phases_s_TP: dict[str, Floats]
    warmth_TPNG: list[Floats]
    """Of the GPUs at work, after each step."""


def simulate(
    plant: Plant,
    settings: list[BuildContext],
    luck: Luck,
    *,
    warmth_NG: Floats | None = None,
    load: Callable[[float], Load] | None = None,
) -> Steps:
    """Steps of every point from empty queues. `load` says what others take, by the seconds since the first step.

    GPUs begin with `warmth_NG`; without it each has the warmth that its point gives it in the long run.
    """
    num_ranks = settings[0].num_workers
    if any(setting.num_workers != num_ranks for setting in settings):
        raise ValueError("points of one GPU count run side by side, not of several")
    gpus, nodes = min(num_ranks, plant.gpus_per_node), -(-num_ranks // plant.gpus_per_node)
    rank_NG = np.arange(nodes * gpus).reshape(nodes, gpus)
    here_NG = rank_NG < num_ranks
    absent_NG = np.where(here_NG, 0.0, -np.inf)
    work_TNG, speed_TNG, chance_TNG, stall_s_TNG = (
        noise_TNG[:, :nodes, :gpus] for noise_TNG in (luck.work_TNG, luck.speed_TNG, luck.chance_TNG, luck.stall_s_TNG)
    )
    num_steps, num_points = len(work_TNG), len(settings)
    cpu, loader, storage, network = plant.cpu, plant.loader, plant.storage, plant.network

    batch_P = per_point(settings, lambda s: s.batch)
    workers_P = per_point(settings, lambda s: s.loader_workers)
    # A batch has no more chunks than this for its threads to take; those of the batches after it can be taken already.
    threads_P = workers_P if loader.whole_batches else np.minimum(workers_P, np.ceil(batch_P / loader.chunk) * loader.prefetch)
    at_once = workers_P[:, 0, 0].astype(int) if loader.whole_batches else np.ones(num_points, dtype=int)
    together_P = np.ones_like(threads_P) if loader.whole_batches else threads_P
    decode_s_P = per_point(settings, lambda s: loader.decode_s * s.decode)
    spread_P = loader.decode_cv / np.sqrt(batch_P)
    lock_P = 1.0 + loader.lock_share * (threads_P - 1.0)
    stalls_P = 1.0 - np.exp(-batch_P * storage.uncached * storage.stalls)
    bytes_P = batch_P * storage.image_bytes * storage.uncached

    phase_s_P, launching_s_P = _gpu_times(plant, settings)
    copy_s_PNG = _copy_times(plant, batch_P, here_NG)
    inside_s, between_s = network.bucket_s(num_ranks, plant.gpus_per_node)
    if num_ranks > 1:
        phase_s_P["backward"] = phase_s_P["backward"] * (1.0 + network.overlap_cost)
    before_P = phase_s_P["augment"] + phase_s_P["teacher"] + phase_s_P["student"]
    backward_P, launch_before_P, launch_backward_P = phase_s_P["backward"], launching_s_P["before"], launching_s_P["backward"]
    optimizer_P = phase_s_P["optimizer"]

    depth = int(at_once.max()) * loader.prefetch + 1
    made_HPNG, taken_HPNG = (np.zeros((depth, num_points, nodes, gpus)) for _ in range(2))
    points, one_at_once = np.arange(num_points), bool((at_once == 1).all())
    over_P = np.zeros((num_points, 1, 1))
    busy_PNG = np.broadcast_to(here_NG, (num_points, nodes, gpus)).astype(float)
    warmth_PNG = np.ones_like(busy_PNG) if warmth_NG is None else np.broadcast_to(warmth_NG[:nodes, :gpus], busy_PNG.shape)
    mains_N = here_NG.sum(-1) * cpu.rank_load
    decoding_P = decode_s_P / (decode_s_P + storage.latency_s)
    alone = plant.alone
    wait_TP, step_TP, speed_TP = (np.empty((num_steps, num_points)) for _ in range(3))
    warmth_TPNG: list[Floats] = []
    num_here = here_NG.sum()
    for t in range(num_steps):
        others = alone if load is None else load(float(over_P[0, 0, 0]))
        # What a batch takes: threads share the cores, and readers the storage, as far as both are at work.
        at_work_PNG = busy_PNG * threads_P
        running_PN1 = ((at_work_PNG * decoding_P).sum(-1) + mains_N + others.busy_N[:nodes])[..., None]
        stretch_PN1 = cpu.stretch(running_PN1)
        decoding_s_PN1 = decode_s_P * stretch_PN1 * cpu.remote(running_PN1) * lock_P
        readers_PN1 = np.maximum(busy_PNG.sum(-1, keepdims=True), 1.0)
        read_N1 = luck.read_TN[t, :nodes, None]
        share_PN1 = np.maximum(
            readers_PN1 / (storage.node_bytes_per_s * read_N1),
            np.maximum(busy_PNG.sum((1, 2), keepdims=True), 1.0)
            / (storage.shared_bytes_per_s * others.storage * luck.read_TN[t, 0]),
        )
        if loader.whole_batches:  # of its rank's share each worker has a part
            share_PN1 = share_PN1 * threads_P
        work_PNG = np.clip(1.0 + spread_P * work_TNG[t], 0.3, 1.9)
        own_s_PNG = work_PNG * batch_P * (storage.latency_s + decoding_s_PN1) / together_P
        make_s_PNG = np.maximum(own_s_PNG, bytes_P * share_PN1)
        stall_PNG = np.where(chance_TNG[t] < stalls_P, stall_s_TNG[t], 0.0)
        # The queue.
        if one_at_once:
            free_PNG = np.maximum(made_HPNG[(t - 1) % depth], taken_HPNG[(t - loader.prefetch) % depth])
        else:
            free_PNG = np.maximum(
                made_HPNG[(t - at_once) % depth, points], taken_HPNG[(t - at_once * loader.prefetch) % depth, points]
            )
        ready_PNG = free_PNG + make_s_PNG + stall_PNG
        made_HPNG[t % depth] = ready_PNG if loader.whole_batches else free_PNG + make_s_PNG
        taken_PNG = np.maximum(ready_PNG, over_P)
        taken_HPNG[t % depth] = taken_PNG
        # The GPU; where it waits for the CPU's launches, it does so for longer on busy cores.
        slow_PN1 = stretch_PN1 - 1.0
        speed_PNG = speed_TNG[t] * plant.heat.slowdown(warmth_PNG) * others.gpu_NG[:nodes, :gpus]
        computed_PNG = copy_s_PNG + (before_P + launch_before_P * slow_PN1) * speed_PNG
        backward_PNG = (backward_P + launch_backward_P * slow_PN1) * speed_PNG
        # The all-reduce. When buckets are of one size, max over i of (all have bucket i) + (the rest's time) is convex in i:
        # it is found at the first or the last bucket.
        bucket_s = (inside_s + between_s / others.links) * luck.link_T[t]
        at_PNG = taken_PNG + computed_PNG + absent_NG
        first_P = (at_PNG + backward_PNG / network.num_buckets).max((1, 2)) + network.num_buckets * bucket_s
        last_P = (at_PNG + backward_PNG).max((1, 2)) + bucket_s
        update_P = optimizer_P[:, 0, 0] * speed_PNG[:, 0, 0]
        ended_P = (np.maximum(first_P, last_P) + update_P)[:, None, None]
        step_P = ended_P - over_P
        # What the next steps find.
        busy_PNG = busy_PNG + BUSY_GAIN * (np.minimum(make_s_PNG / (at_once[:, None, None] * step_P), 1.0) * here_NG - busy_PNG)
        used_PNG = (computed_PNG + backward_PNG + optimizer_P) / step_P
        gain_P = RESTING_GAIN if warmth_NG is None else -np.expm1(-step_P / plant.heat.constant_s)
        warmth_PNG = warmth_PNG + gain_P * (np.minimum(used_PNG, 1.0) - warmth_PNG)
        wait_TP[t] = ((taken_PNG - over_P) * here_NG).sum((1, 2)) / num_here
        speed_TP[t] = (speed_PNG * here_NG).sum((1, 2)) / num_here
        step_TP[t] = step_P[:, 0, 0]
        warmth_TPNG.append(warmth_PNG)
        over_P = ended_P

    copy_P = (copy_s_PNG * here_NG).sum((1, 2)) / num_here
    phases = {"data": wait_TP, "h2d": np.broadcast_to(copy_P, step_TP.shape)}
    for phase in ("augment", "teacher", "student", "optimizer"):
        phases[phase] = phase_s_P[phase][:, 0, 0] * speed_TP
    phases["backward"] = np.maximum(step_TP - np.sum(list(phases.values()), axis=0), 0.0)
    return Steps(step_TP, phases, warmth_TPNG)


def _gpu_times(plant: Plant, settings: list[BuildContext]) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Seconds of each phase on the GPU alone, and how much of them is launching, before and in the backward pass."""
    gpu, rows, launching = plant.gpu, [], []
    for setting in settings:
        arguments = (setting.batch, gpu.launch_s, gpu.multiprocessors, setting.speedup)
        teacher_s, teacher_launching_s = gpu.teacher.times(*arguments)
        student_s, student_launching_s = gpu.student.times(*arguments)
        backward_s, backward_launching_s = gpu.backward.times(*arguments)
        augment_s = setting.batch * (gpu.augment_image_s + setting.gpu_image_s)
        slower = plant.memory.slowdown(plant.memory.peak_mib(setting.batch, setting.memory)) * gpu.choice(setting.batch)
        rows.append([augment_s, teacher_s * slower, student_s * slower, backward_s * slower, gpu.optimizer_s])
        launching.append([teacher_launching_s + student_launching_s, backward_launching_s])
    columns = np.array(rows).T[..., None, None]
    phases = dict(zip(("augment", "teacher", "student", "backward", "optimizer"), columns, strict=True))
    return phases, dict(zip(("before", "backward"), np.array(launching).T[..., None, None], strict=True))


def _copy_times(plant: Plant, batch_P: Floats, here_NG: np.ndarray) -> Floats:
    """Seconds that a rank waits for its batch's copy: all of a node copy at once, those of a second socket from afar."""
    copying, cpu = plant.copying, plant.cpu
    gpus = here_NG.shape[1]
    far_G = np.arange(gpus) * cpu.sockets // plant.gpus_per_node > 0
    speed_NG = np.minimum(copying.gpu_bytes_per_s, copying.node_bytes_per_s / np.maximum(here_NG.sum(-1, keepdims=True), 1))
    seconds_PNG = copying.exposed * batch_P * copying.image_bytes * np.where(far_G, 1.0 + cpu.remote_loss, 1.0) / speed_NG
    return np.asarray(seconds_PNG)
