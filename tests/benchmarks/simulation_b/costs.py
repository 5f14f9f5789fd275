"""What one step costs on average, part by part, before queues and chance: compute, all-reduce, loading, memory.

Shapes: P points, R ranks (padded to the cluster's GPUs; a rank that a point does not have costs nothing). Seconds, bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.simulation_b.cluster import LINKS, STORES, Cluster, Model, Point, Tenant

Array = NDArray[np.float64]
BUCKET_BYTES = 25 * 2**20
BACKWARD_PASSES = 2  # a backward pass is two forward ones: gradients of weights and of inputs


@dataclass(frozen=True)
class Conditions:
    """What is not of the point: how hot GPUs are and how far memory has grown (0 to 1), the part of the data set that nodes have
    read before, and whether a tenant is there. The defaults are those of a long run."""

    heat: float = 1.0
    growth: float = 1.0
    coverage: float = 1.0
    tenant: Tenant | None = None


@dataclass(frozen=True)
class Costs:
    """Means of a step; `load_PR` is what one loader worker takes for one batch, `stall_PR` the chance of a stalled read in it."""

    num_workers_P: Array
    loader_workers_P: NDArray[np.int64]
    teacher_PR: Array
    student_PR: Array
    backward_PR: Array
    exposed_P: Array  # all-reduce that backward does not hide
    optimizer_PR: Array
    load_PR: Array
    read_PR: Array  # the part of `load_PR` that waits for storage
    stall_PR: Array


def step_costs(cluster: Cluster, points: Sequence[Point], conditions: Conditions) -> Costs:
    num_P, batch_P, loaders_P = _columns(points)
    is_bf16_P = np.array([point.precision == "bf16" for point in points])
    rank_R = np.arange(len(cluster.rank_gpu_speed))
    has_PR = (rank_R < num_P[:, None]).astype(float)
    ranks_on_node_PR = np.clip(num_P[:, None] - rank_R // cluster.gpus_per_node * cluster.gpus_per_node, 1, cluster.gpus_per_node)
    tenant = conditions.tenant
    cpu_R = np.array(cluster.rank_cpu_speed) * (tenant.cpu if tenant else 1)
    speed_PR = np.array(cluster.rank_gpu_speed) * (1 - cluster.throttle * conditions.heat)
    # Near the end of memory the allocator frees its pool and asks for it again (PyTorch's `num_alloc_retries`).
    fraction_P = memory_fraction(cluster, points) * (1 + cluster.fragmentation * conditions.growth)
    speed_PR = speed_PR / (1 + 0.25 * np.clip((fraction_P - 0.94) / 0.06, 0, 1))[:, None]

    def parts(launch_PR: Array) -> tuple[Array, Array, Array, Array]:
        teacher_PR = _forward_s(cluster, cluster.teacher, batch_P, is_bf16_P, speed_PR, launch_PR)
        student_PR = _forward_s(cluster, cluster.student, batch_P, is_bf16_P, speed_PR, launch_PR)
        params_bytes = cluster.student.params_m * 4e6
        # Parameters, gradients and states are read and written; fused kernels, so that few launches remain.
        update_PR = params_bytes * (3 + 2 * cluster.optimizer_states) / (cluster.gpu.bandwidth * 1e9) / speed_PR
        optimizer_PR = update_PR + (cluster.python_s / cluster.launch_s + 40) * launch_PR
        return teacher_PR, student_PR, student_PR * BACKWARD_PASSES, optimizer_PR

    # How busy the loader workers are decides how they share cores and storage, which decides how busy they are: a fixed point.
    launch_PR = np.full(has_PR.shape, cluster.launch_s) / cpu_R
    compute_P = (sum(parts(launch_PR)) * has_PR).max(1)
    busy_PR = has_PR
    read_PR, decode_PR = np.full(has_PR.shape, 1e-9), np.full(has_PR.shape, 1e-9)
    for _ in range(12):
        decoding_PR = busy_PR * loaders_P[:, None] * decode_PR / (read_PR + decode_PR)
        share_PR = cpu_R * _share_of_a_core(cluster, ranks_on_node_PR * (1 + decoding_PR))
        decode_PR = batch_P[:, None] * cluster.decode_s / share_PR
        reading_PR = busy_PR * loaders_P[:, None] - decoding_PR
        read_PR = batch_P[:, None] * _read_s(cluster, reading_PR, ranks_on_node_PR, has_PR, conditions)
        step_P = np.maximum(compute_P, ((read_PR + decode_PR) / loaders_P[:, None] * has_PR).max(1))
        wanted_PR = (read_PR + decode_PR) / (loaders_P * step_P)[:, None]
        busy_PR = has_PR * (0.5 * busy_PR + 0.5 * np.minimum(1, wanted_PR))

    teacher_PR, student_PR, backward_PR, optimizer_PR = parts(cluster.launch_s / share_PR)
    exposed_P, slower_P = _exposed_all_reduce_s(cluster, num_P, (backward_PR * has_PR).max(1), tenant)
    stalls = STORES[cluster.store][3] * 1e-4
    return Costs(
        num_workers_P=num_P,
        loader_workers_P=loaders_P.astype(np.int64),
        teacher_PR=teacher_PR * has_PR,
        student_PR=student_PR * has_PR,
        backward_PR=backward_PR * slower_P[:, None] * has_PR,
        exposed_P=exposed_P,
        optimizer_PR=optimizer_PR * has_PR,
        load_PR=(read_PR + decode_PR) * has_PR,
        read_PR=read_PR * has_PR,
        stall_PR=(1 - (1 - stalls) ** (batch_P * _miss_fraction(cluster, conditions)))[:, None] * has_PR,
    )


def memory_fraction(cluster: Cluster, points: Sequence[Point]) -> Array:
    """Peak memory of the first steps as a part of the GPU's.

    A fixed part (CUDA context, weights, gradients, states, DDP's buckets) and activations linear in the batch, as Gao et al. 2020
    ("DNNMem") find; autocast keeps some activations in fp32. The teacher keeps two layers' worth at a time.
    """
    num_P, batch_P, _ = _columns(points)
    half_P = np.array([0.58 if point.precision == "bf16" else 1.0 for point in points])
    copies_P = 2 + cluster.optimizer_states + (num_P > 1)
    fixed_P = 0.9e9 + cluster.student.params_m * 4e6 * copies_P + cluster.teacher.params_m * 4e6
    per_image = (cluster.student.activation_mb + cluster.teacher.activation_mb * 0.08) * 1e6
    return (fixed_P + batch_P * per_image * half_P) / (cluster.gpu.memory_gib * 2**30)


def _columns(points: Sequence[Point]) -> tuple[Array, Array, Array]:
    """Workers, batch of a rank (the largest), loader workers."""
    num_P, batch_P, loaders_P = np.array([(p.num_workers, p.global_batch_size, p.loader_workers) for p in points], float).T
    return num_P, np.ceil(batch_P / num_P), loaders_P


def _forward_s(cluster: Cluster, model: Model, batch_P: Array, is_bf16_P: Array, speed_PR: Array, launch_PR: Array) -> Array:
    """A forward pass: arithmetic and memory traffic ("Roofline", Williams et al. 2009), or the launches where they take longer.

    Arithmetic goes in whole waves of thread blocks over the SMs ("wave quantization" in NVIDIA's "Deep Learning Performance
    Guide"), by stage of the network, as later ones have fewer tiles. Tensor cores want multiples of 8. cuDNN's algorithms fit
    some sizes better than others (Jordà et al. 2019, "Performance evaluation of cuDNN convolution algorithms").
    """
    gpu = cluster.gpu
    peak_P = np.where(is_bf16_P, gpu.bf16, gpu.fp32) * 1e12 * cluster.flops_fraction
    waves_P = np.zeros_like(batch_P)
    for tiles in model.tiles:
        filled_P = batch_P * tiles / gpu.num_sms
        waves_P += np.ceil(filled_P) / filled_P / len(model.tiles)
    if gpu.bf16:
        waves_P *= np.where(batch_P % 8, 1.1, 1)
    sizes, index_P = np.unique(batch_P.astype(int), return_inverse=True)
    fit = np.array([np.random.default_rng([cluster.seed, size]).lognormal(0, cluster.kernel_spread) for size in sizes])
    arithmetic_P = batch_P * model.gflops * 1e9 / peak_P * waves_P * fit[index_P]
    moved_mb_P = batch_P * model.activation_mb * np.where(is_bf16_P, 1, 2)
    in_l2_P = np.minimum(1, gpu.l2_mb * model.num_kernels / 3 / np.maximum(moved_mb_P, 1e-9))  # a layer has about three kernels
    traffic_P = moved_mb_P * (1 - 0.5 * in_l2_P) / (gpu.bandwidth * 1e3)
    return np.maximum(np.hypot(arithmetic_P, traffic_P)[:, None] / speed_PR, model.num_kernels * launch_PR)


def _share_of_a_core(cluster: Cluster, processes_PR: Array) -> Array:
    """Speed of one of so many running processes on a node, where a process alone on a core has 1.

    The second thread of a core adds something (Mohan et al. 2021 find 30 % for decoding), more processes than threads add
    switches. Beyond one socket's cores, memory is remote for some (Lameter 2013, "NUMA: an overview").
    """
    x, cores = processes_PR, cluster.cores
    capacity = np.minimum(x, cores) + cluster.smt_gain * np.clip(x - cores, 0, cores)
    capacity = capacity / (1 + 0.08 * np.maximum(0, x / (2 * cores) - 1))
    if cluster.sockets > 1:
        capacity = capacity * (1 - 0.08 * np.clip(2 * x / cores - 1, 0, 1))
    return capacity / np.maximum(x, 1)


def _miss_fraction(cluster: Cluster, conditions: Conditions) -> float:
    """Reads that go to storage. A page cache smaller than the data set holds less than its share, since it evicts what the
    same epoch still wants (Mohan et al. 2021, "Analyzing and mitigating data stalls in DNN training", thrashing)."""
    return 1 - conditions.coverage * cluster.cache_fraction**1.25


def _read_s(cluster: Cluster, reading_PR: Array, ranks_on_node_PR: Array, has_PR: Array, conditions: Conditions) -> Array:
    """Seconds a loader worker waits for an image: latency, and its share of the bandwidth of a node or of all nodes together."""
    bandwidth, latency, is_shared, _ = STORES[cluster.store]
    readers_PR = (reading_PR * has_PR).sum(1, keepdims=True) if is_shared else reading_PR * ranks_on_node_PR
    left = conditions.tenant.storage if conditions.tenant else 1
    seconds_PR = (latency + cluster.image_bytes * np.maximum(1, readers_PR) / bandwidth) / left
    return seconds_PR * _miss_fraction(cluster, conditions) + 1e-9


def _exposed_all_reduce_s(cluster: Cluster, num_P: Array, backward_P: Array, tenant: Tenant | None) -> tuple[Array, Array]:
    """All-reduce after the end of backward, and by how much backward is slower for what ran at the same time.

    Two levels, NVLink or PCIe inside a node and a link between nodes, each a latency and a bandwidth (Thakur et al. 2005);
    between nodes the faster of NCCL's ring and double binary tree (Sanders et al. 2009; NCCL 2.4). Buckets of 25 MiB start
    as backward fills them (Li et al. 2020, "PyTorch Distributed").
    """
    link_bytes_s, link_latency = LINKS[cluster.link]
    link_bytes_s *= tenant.network if tenant else 1
    total = cluster.student.params_m * 4e6
    num_buckets = int(np.ceil(total / BUCKET_BYTES))
    size = total / num_buckets
    local_P = np.minimum(num_P, cluster.gpus_per_node)
    nodes_P = np.ceil(num_P / cluster.gpus_per_node)
    inside_P = 2 * (local_P - 1) * (6e-6 + size / local_P / cluster.intra_bytes_s)
    ring_P = 2 * (nodes_P - 1) * (link_latency + size / nodes_P / link_bytes_s)
    tree_P = 2 * np.log2(nodes_P) * link_latency + np.where(nodes_P > 1, 2 * size / link_bytes_s / 0.9, 0)
    bucket_P = np.where(num_P > 1, 2e-5 + inside_P + np.minimum(ring_P, tree_P), 0)
    done_P = np.zeros_like(backward_P)
    for k in range(num_buckets):
        done_P = np.maximum(done_P, backward_P * (k + 1) / num_buckets) + bucket_P
    hidden_P = backward_P + num_buckets * bucket_P - done_P
    slower_P = 1 + 0.08 * np.clip(hidden_P / backward_P, 0, 1)  # NCCL's kernels take SMs and memory bandwidth
    return done_P - backward_P, slower_P
