"""A searcher's time on a cluster: probes one after the other, what they cost, and what the clock brings: heat and a tenant."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.benchmarks.simulation.cluster import WARM_UP_STEPS, Cluster, Point
from tests.benchmarks.simulation.parts import Floats, Load

STEPS = 60
"""Most of a probe: the product's default."""
OOM_S = 5.0
"""What a probe lasts, after its start and set-up, until it is out of memory."""
CHECK_EVERY = 4
"""Steps between the product's questions whether a probe may end."""


@dataclass(frozen=True)
class Probe:
    """One visit to a point."""

    point: Point
    status: str
    steps_s: Floats = field(default_factory=lambda: np.empty(0))
    phases_s: dict[str, float] = field(default_factory=dict)
    peak_memory_mib: float | None = None
    start_s: float | None = None
    """Of the worker group; None where it was there already."""
    seconds: float = 0.0
    """Wall time, start and set-up included."""

    @property
    def step_s(self) -> float:
        """Mean; infinite where nothing was measured."""
        return float(self.steps_s.mean()) if len(self.steps_s) else np.inf


class Session:
    """Keeps the account. A point may be probed as often as wanted; each time at the time that it is then.

    A worker group is started anew where its size changes from the probe before, and after a probe that ended it. What a plan can
    see to be infeasible costs nothing.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.gpu_s, self.clock_s, self.num_probes = 0.0, 0.0, 0
        self._rng = np.random.default_rng([cluster.seed, seed, 7])
        self._warmth_NG = np.zeros((cluster.plant.nodes, cluster.plant.gpus_per_node))
        self.group = 0
        """Workers of the group that is there; 0 where none is."""

    @property
    def lean_grids(self) -> float:
        """What was spent so far, in GPU-seconds of a lean grid."""
        return self.gpu_s / self.cluster.lean_grid_gpu_s

    def probe(self, point: Point, steps: int = STEPS, should_stop: Callable[[Floats], bool] | None = None) -> Probe:
        """Measure at most `steps` steps after the warm-up, which is paid for too; `should_stop` may end it before."""
        plant, status, num_workers = self.cluster.plant, self.cluster.status(point), point["scale.num_workers"]
        if status == "infeasible":
            return Probe(point, status)
        start_s, began_s = plant.start_s if num_workers != self.group else None, self.clock_s
        self.group, self.num_probes = num_workers, self.num_probes + 1
        self._pass(num_workers, (start_s or 0.0) + plant.setup_s)
        if status == "oom":
            self.group = 0  # a group that ran out of memory is not used again
            self._pass(num_workers, OOM_S)
            return Probe(point, status, start_s=start_s, seconds=self.clock_s - began_s)
        fails = self._rng.random() < plant.failures
        measured = self.cluster.measure(point, steps, self._rng, WARM_UP_STEPS, self._warmth_NG, self._load())
        assert not isinstance(measured, str)
        num = next(
            (k for k in range(CHECK_EVERY, steps, CHECK_EVERY) if should_stop and should_stop(measured.steps_s[:k])), steps
        )
        if fails:
            num = int(self._rng.integers(1, num + 1))
        steps_s, warmth_NG = measured.steps_s[:num], measured.warmth_TNG[WARM_UP_STEPS + num - 1]
        self._pass(num_workers, measured.warm_up_s + float(steps_s.sum()))
        self._warmth_NG[: warmth_NG.shape[0], : warmth_NG.shape[1]] = warmth_NG
        if fails:
            self.group = 0
            return Probe(point, "failed", start_s=start_s, seconds=self.clock_s - began_s)
        phases_s = {phase: float(seconds[:num].mean()) for phase, seconds in measured.phases_s.items()}
        return Probe(point, "ok", steps_s, phases_s, measured.peak_memory_mib, start_s, self.clock_s - began_s)

    def _load(self) -> Callable[[float], Load] | None:
        tenant, began_s, alone = self.cluster.tenant, self.clock_s, self.cluster.plant.alone
        if tenant is None:
            return None
        return lambda seconds: tenant.load if tenant.is_there(began_s + seconds) else alone

    def _pass(self, num_workers: int, seconds: float) -> None:
        """Time goes by: it is paid for, and GPUs without work cool down."""
        self.gpu_s += num_workers * seconds
        self.clock_s += seconds
        self._warmth_NG = self._warmth_NG * np.exp(-seconds / self.cluster.plant.heat.constant_s)
