"""What is so in the long run, which no short trial shows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.simulation_b.cluster import Cluster
from tests.benchmarks.simulation_b.costs import Array, Conditions, memory_fraction, step_costs
from tests.benchmarks.simulation_b.pipeline import Pipeline, draw_steps


@dataclass(frozen=True)
class Truth:
    """Arrays in the order of `cluster.points`; `phases_s` has the columns of `PHASES`, without pauses and tenant."""

    step_time_s: Array
    images_per_s: Array
    quiet_images_per_s: Array
    phases_s: Array
    fits: NDArray[np.bool_]

    @property
    def best(self) -> int:
        """Index of the fastest point that fits."""
        return int(np.argmax(np.where(self.fits, self.images_per_s, 0)))

    def near_best(self, tolerance: float = 0.025) -> NDArray[np.bool_]:
        """Points that fit and are at most so much slower than the best."""
        return self.fits & (self.images_per_s >= (1 - tolerance) * self.images_per_s[self.best])


def truth(cluster: Cluster, num_steps: int = 1000) -> Truth:
    """The long-run means, from `num_steps` steps of all points with the same chances (about 0.3 ms a step)."""
    images_P = np.array([point.global_batch_size for point in cluster.points], float)
    phases_PK = _mean_phases(cluster, Conditions(), num_steps)
    pauses = 1 + cluster.hiccup_s / cluster.hiccup_every_s
    quiet_P = images_P / (phases_PK.sum(1) * pauses)
    images_per_s = quiet_P
    if cluster.tenant:
        busy_P = images_P / (_mean_phases(cluster, Conditions(tenant=cluster.tenant), num_steps).sum(1) * pauses)
        images_per_s = quiet_P + cluster.tenant.busy_fraction * (busy_P - quiet_P)
    return Truth(
        step_time_s=images_P / images_per_s,
        images_per_s=images_per_s,
        quiet_images_per_s=quiet_P,
        phases_s=phases_PK,
        fits=memory_fraction(cluster, cluster.points) * (1 + cluster.fragmentation) <= 1,
    )


def bottleneck(cluster: Cluster) -> str:
    """What takes longest in a step of the best point, by mean costs alone: `loading`, `storage`, `network` or `compute`."""
    costs = step_costs(cluster, cluster.points, Conditions())
    compute_P = (costs.teacher_PR + costs.student_PR + costs.backward_PR + costs.optimizer_PR).max(1)
    load_P, read_P = ((part / costs.loader_workers_P[:, None]).max(1) for part in (costs.load_PR, costs.read_PR))
    images_P = np.array([point.global_batch_size for point in cluster.points])
    fits_P = memory_fraction(cluster, cluster.points) * (1 + cluster.fragmentation) <= 1
    best = np.argmax(fits_P * images_P / np.maximum(compute_P + costs.exposed_P, load_P))
    if load_P[best] > compute_P[best] + costs.exposed_P[best]:
        return "storage" if read_P[best] > load_P[best] / 2 else "loading"
    return "network" if costs.exposed_P[best] > 0.2 * compute_P[best] else "compute"


def _mean_phases(cluster: Cluster, conditions: Conditions, num_steps: int) -> Array:
    """After the steps in which the queues have filled or emptied: P × `PHASES`."""
    rng = np.random.default_rng([cluster.seed, 1])
    costs = step_costs(cluster, cluster.points, conditions)
    pipeline = Pipeline(costs)
    pipeline.advance(costs, draw_steps(cluster, 100, rng))
    return pipeline.advance(costs, draw_steps(cluster, num_steps, rng)).mean(0)
