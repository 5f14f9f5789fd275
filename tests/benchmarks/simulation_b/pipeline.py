"""Steps one after the other: bounded loader queues on each rank, and ranks that wait for the slowest in every step.

Shapes: S steps, P points, R ranks.
"""

from dataclasses import dataclass

import numpy as np

from tests.benchmarks.simulation_b.cluster import Cluster
from tests.benchmarks.simulation_b.costs import Array, Costs

PHASES = ("data_wait", "teacher", "student", "backward", "all_reduce_wait", "optimizer")
PREFETCH = 2  # batches that each loader worker may be ahead, as in PyTorch's DataLoader
MAX_STALL_S = 4.0


@dataclass
class Draws:
    """The chances of S steps on R ranks, the same for all points, so that points differ by what they are."""

    compute_SR: Array
    load_SR: Array
    network_S: Array
    stalled_SR: Array
    stall_s_SR: Array


def draw_steps(cluster: Cluster, num_steps: int, rng: np.random.Generator) -> Draws:
    """Jitter with mean 1, rare steps that are much slower, and stalled reads with a Pareto tail (Dean & Barroso 2013, "The
    tail at scale"); messages vary more where others use the link too."""
    shape = num_steps, len(cluster.rank_gpu_speed)
    compute_SR = _lognormal(rng, cluster.jitter, shape)
    compute_SR *= np.where(rng.random(shape) < cluster.outliers, rng.uniform(1.2, 2.5, shape), 1)
    network_S = _lognormal(rng, 0.25 if "GbE" in cluster.link else 0.06, (num_steps,))
    stall_s_SR = np.minimum(0.05 * (1 + rng.pareto(1.5, shape)), MAX_STALL_S)
    return Draws(compute_SR, _lognormal(rng, cluster.load_jitter, shape), network_S, rng.random(shape), stall_s_SR)


def _lognormal(rng: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> Array:
    return rng.lognormal(-(sigma**2) / 2, sigma, shape)


class Pipeline:
    """Loader workers, queues and ranks of P points, from the start of a trial on. `now_P` is each point's clock."""

    def __init__(self, costs: Costs) -> None:
        self.now_P = np.zeros(len(costs.num_workers_P))
        self._length = PREFETCH * int(costs.loader_workers_P.max())
        shape = self._length, *costs.load_PR.shape
        self._ready_HPR, self._taken_HPR = np.zeros(shape), np.zeros(shape)
        self._step = 0

    def advance(self, costs: Costs, draws: Draws, extra_s: Array | None = None) -> Array:
        """As many steps as were drawn, under the same costs: the seconds of each phase, S × P × `PHASES`.

        Args:
            extra_s: added to the student's forward pass of each step: autotuning.
        """
        num_steps = len(draws.network_S)
        compute_PR = costs.teacher_PR + costs.student_PR + costs.backward_PR
        num_P, points_P = costs.num_workers_P, np.arange(len(costs.num_workers_P))
        parts_P3 = np.stack([part.sum(1) for part in (costs.teacher_PR, costs.student_PR, costs.backward_PR)], -1)
        parts_P3 /= parts_P3.sum(1, keepdims=True)
        optimizer_P = costs.optimizer_PR.max(1)
        phases_SPK = np.empty((num_steps, len(num_P), len(PHASES)))
        for i in range(num_steps):
            # DataLoader's order: batch k is of worker k mod W, which begins it once it has finished batch k − W and once the
            # loop has taken batch k − 2W.
            free_PR = self._ready_HPR[(self._step - costs.loader_workers_P) % self._length, points_P]
            slot_PR = self._taken_HPR[(self._step - PREFETCH * costs.loader_workers_P) % self._length, points_P]
            stall_PR = (draws.stalled_SR[i] < costs.stall_PR) * draws.stall_s_SR[i]
            ready_PR = np.maximum(free_PR, slot_PR) + costs.load_PR * draws.load_SR[i] + stall_PR
            taken_PR = np.maximum(ready_PR, self.now_P[:, None])
            self._ready_HPR[self._step % self._length] = ready_PR
            self._taken_HPR[self._step % self._length] = taken_PR
            busy_PR = compute_PR * draws.compute_SR[i]
            extra = 0.0 if extra_s is None else extra_s[i]
            synced_P = (taken_PR + busy_PR).max(1) + costs.exposed_P * draws.network_S[i] + extra
            data_P = (taken_PR - self.now_P[:, None]).sum(1) / num_P
            busy_P = busy_PR.sum(1) / num_P
            phases_SPK[i, :, 0] = data_P
            phases_SPK[i, :, 1:4] = busy_P[:, None] * parts_P3
            phases_SPK[i, :, 2] += extra
            phases_SPK[i, :, 4] = synced_P - self.now_P - data_P - busy_P - extra
            phases_SPK[i, :, 5] = optimizer_P
            self.now_P = synced_P + optimizer_P
            self._step += 1
        return phases_SPK
