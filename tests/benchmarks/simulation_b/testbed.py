"""Trials on a simulated cluster, one after the other, in the time of one testbed."""

from dataclasses import dataclass

import numpy as np

from tests.benchmarks.simulation_b.cluster import Cluster, Point
from tests.benchmarks.simulation_b.costs import Array, Conditions, memory_fraction, step_costs
from tests.benchmarks.simulation_b.pipeline import PHASES, Pipeline, draw_steps

REFRESH_S = 10.0  # how often heat, cache and tenant are looked at
GROWTH_STEPS = 400.0  # in which most of the growth of memory has happened


@dataclass(frozen=True)
class Trial:
    """What a trial reports; arrays have a row for each step that was finished."""

    point: Point
    outcome: str  # ok, oom, failed
    step_times_s: Array
    phases_s: Array
    peak_memory_fraction: float
    startup_s: float
    wall_s: float


class Testbed:
    """A cluster in use: its clock, how hot its GPUs are, what its page caches hold, and when the tenant is there."""

    __test__ = False  # no test of pytest's, by its name

    def __init__(self, cluster: Cluster, seed: int = 0, *, warm: bool = False) -> None:
        """`warm`: hot GPUs and full page caches from the first trial on."""
        self.cluster = cluster
        self.now_s = 0.0
        self._rng = np.random.default_rng([cluster.seed, seed])
        self._heat = float(warm)
        self._images_read = np.full(-(-len(cluster.rank_gpu_speed) // cluster.gpus_per_node), np.inf if warm else 0.0)
        self._steps_s = 0.0  # time in steps, by which pauses come
        pauses_and_runs = (cluster.tenant.pause_s, cluster.tenant.busy_s) if cluster.tenant else (np.inf,)
        self._changes_s = np.cumsum(self._rng.exponential(np.resize(pauses_and_runs, 2000)))

    def is_tenant_busy(self) -> bool:
        return self.cluster.tenant is not None and int(np.searchsorted(self._changes_s, self.now_s)) % 2 == 1

    def measure(self, point: Point, num_steps: int) -> Trial:
        """Start a training of `point` and let it run `num_steps` steps, or until it runs out of memory or fails."""
        cluster, rng, began_s = self.cluster, self._rng, self.now_s
        startup_s = cluster.startup_s * rng.uniform(0.85, 1.3) + 0.3 * point.num_workers
        self._cool(startup_s)
        last_step, hang_s = self._failure(point, num_steps)
        memory = float(memory_fraction(cluster, [point])[0]) * rng.uniform(0.997, 1.0)
        growth_S = 1 - np.exp(-np.arange(num_steps) / GROWTH_STEPS)
        memory_S = memory * (1 + cluster.fragmentation * growth_S)
        fitting = int((memory_S <= 1).sum())
        outcome = "oom" if fitting < min(num_steps, last_step + 1) else "ok" if last_step >= num_steps else "failed"
        steps = min(fitting, last_step, num_steps)
        phases_SK = self._run(point, steps, growth_S)
        if outcome == "failed":
            self._cool(hang_s)
        return Trial(
            point=point,
            outcome=outcome,
            step_times_s=phases_SK.sum(1),
            phases_s=phases_SK,
            peak_memory_fraction=1.0 if outcome == "oom" else float(memory_S[max(0, steps - 1)]),
            startup_s=startup_s,
            wall_s=self.now_s - began_s,
        )

    def _failure(self, point: Point, num_steps: int) -> tuple[int, float]:
        """The step at which a worker fails (beyond the last: none does), and the seconds until that is noticed.

        Failures come early, and more often with more GPUs (Jeon et al. 2019, "Analysis of large-scale multi-tenant GPU
        clusters").
        """
        rng = self._rng
        fails = rng.random() < 1 - (1 - self.cluster.failure) ** point.num_workers
        step = int(num_steps * rng.beta(0.5, 1)) if fails else num_steps
        return step, rng.uniform(120, 400) if rng.random() < 0.25 else rng.uniform(1, 10)

    def _run(self, point: Point, num_steps: int, growth_S: Array) -> Array:
        """Steps in pieces of `REFRESH_S`, each under the conditions in which it begins."""
        cluster, rng = self.cluster, self._rng
        # cuDNN and the allocator try what is fastest in the first step, and for some steps more.
        warmup_S = rng.uniform(1, 8) * np.r_[1, 0.15 * 0.4 ** np.arange(max(0, num_steps - 1))][:num_steps]
        pieces, done, pipeline = [np.empty((0, len(PHASES)))], 0, None
        while done < num_steps:
            costs = step_costs(cluster, [point], self._conditions(point, float(growth_S[done])))
            pipeline = pipeline or Pipeline(costs)
            compute_s = float((costs.teacher_PR + costs.student_PR + costs.backward_PR).max())
            load_s = float(costs.load_PR.max()) / point.loader_workers
            size = min(num_steps - done, max(1, int(REFRESH_S / max(compute_s, load_s))))
            phases_SK = pipeline.advance(costs, draw_steps(cluster, size, rng), warmup_S[done:])[:, 0]
            self._add_pauses(phases_SK)
            nodes = self._nodes(point)
            self._images_read[:nodes] += size * point.global_batch_size / nodes
            self._heat += (1 - self._heat) * (1 - np.exp(-phases_SK.sum() / cluster.heat_s))
            self.now_s += float(phases_SK.sum())
            pieces.append(phases_SK)
            done += size
        return np.concatenate(pieces)

    def _conditions(self, point: Point, growth: float) -> Conditions:
        read = self._images_read[: self._nodes(point)] / self.cluster.dataset_images
        coverage = float(np.mean(1 - np.exp(-read)))  # images are drawn at random, some of them twice before others come
        return Conditions(self._heat, growth, coverage, self.cluster.tenant if self.is_tenant_busy() else None)

    def _nodes(self, point: Point) -> int:
        return -(-point.num_workers // self.cluster.gpus_per_node)

    def _add_pauses(self, phases_SK: Array) -> None:
        """Pauses of the whole job, at regular times; the loop sees them as a wait for data."""
        ends_S = self._steps_s + np.cumsum(phases_SK.sum(1))
        count_S = np.diff(np.floor(np.r_[self._steps_s, ends_S] / self.cluster.hiccup_every_s))
        phases_SK[:, 0] += count_S * self._rng.exponential(self.cluster.hiccup_s, len(count_S))
        self._steps_s = float(ends_S[-1])

    def _cool(self, seconds: float) -> None:
        self._heat *= float(np.exp(-seconds / self.cluster.heat_s))
        self.now_s += seconds
