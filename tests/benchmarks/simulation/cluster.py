"""A cluster of a seed: what a searcher may ask of it, and the truth that it is judged by.

The truth of a point is the mean time of its steps in the long run: GPUs as warm as it makes them, storage and stragglers as they
are, nobody else on the cluster. It is taken over one long run of all points under the same luck, so that what chance there is in
it is common to all. A failure that would not come again, a start, a set-up and a tenant are no part of it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.benchmarks.simulation.draw import EXTRAS, Drawn, draw, draw_tenant
from tests.benchmarks.simulation.parts import BuildContext, Floats, Load, Tenant
from tests.benchmarks.simulation.steps import Luck, Steps, simulate

if TYPE_CHECKING:
    from tests.benchmarks.simulation.session import Session

Point = Mapping[str, Any]
TRUTH_STEPS, LONG_TRUTH_STEPS, SETTLE_STEPS = 300, 2400, 60
MIN_FEASIBLE = 40
CONTENDERS = 0.08
"""Points whose shorter truth is within this of the best's are compared by a longer one."""
METRICS = ("images_per_s", "epoch_s", "gpu_s_per_epoch")
LEAN_STEPS, WARM_UP_STEPS = 40, 5
"""Of a point of a lean grid; of every probe before it counts: the product's `train.warmup_steps`."""
BRIM = 0.985
"""Share of the memory that the largest batch takes of a cluster that is asked for so."""


@dataclass(frozen=True)
class Measured:
    """A probe's steps after its warm-up, and what the warm-up took."""

    steps_s: Floats
    phases_s: dict[str, Floats]
    peak_memory_mib: float
    warm_up_s: float
    warmth_TNG: list[Floats]
    """Of the GPUs at work after each step, the warm-up's among them."""


class Cluster:
    """Hardware, networks, data and a space, all of a seed; every answer is a pure function of its arguments."""

    def __init__(
        self,
        seed: int,
        drawn: Drawn | None = None,
        *,
        tenant: bool | tuple[float, float] | None = None,
        noise: float = 1.0,
        failures: float | None = None,
        brim: bool = False,
    ) -> None:
        """Without options the cluster that is reported on.

        `tenant` puts somebody else there (True), from one time to another in lean grids of wall time (a pair), or nobody (False);
        `noise` multiplies all spreads of steps; `failures` is the probability of a probe to fail; `brim` gives the GPUs so little
        memory that the largest batch which runs takes 98.5% of it.
        """
        self.seed = seed
        for attempt in itertools.count():
            self._drawn = drawn or draw(seed, attempt)
            self.kind, self.plant = self._drawn.kind, self._drawn.plant
            if drawn or sum(self.status(point) == "ok" for point in self.points) >= MIN_FEASIBLE:
                break
            del self.points  # the next attempt has others
        jitter = self.plant.jitter
        louder = {
            name: noise * getattr(jitter, name) for name in ("step_noise", "rank_noise", "read_noise", "link_noise", "spike_rate")
        }
        self.plant = replace(
            self.plant, jitter=replace(jitter, **louder), failures=self.plant.failures if failures is None else failures
        )
        if brim:
            peaks = [self.peak_memory_mib(point) for point in self.points if self.status(point) == "ok"]
            self.plant = replace(self.plant, memory=replace(self.plant.memory, gpu_mib=max(peaks) / BRIM))
        self._tenant = tenant

    def session(self, seed: int) -> "Session":
        """A searcher's time on this cluster."""
        from tests.benchmarks.simulation.session import Session

        return Session(self, seed)

    @cached_property
    def points(self) -> list[Point]:
        space = self._drawn.space
        return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]

    @property
    def possible(self) -> list[Point]:
        """Without those that a sweep refuses before it begins: no node has the CPUs, or the batch too few images."""
        return [point for point in self.points if self.status(point) != "infeasible"]

    @cached_property
    def tenant(self) -> Tenant | None:
        """Who else is there, and when."""
        if self._tenant is False:
            return None
        seed, whole_s = self.seed, self.lean_grid_s
        found = draw_tenant(seed, self.plant, whole_s)
        while found is None and self._tenant is not None:
            seed += 1_000_000
            found = draw_tenant(seed, self.plant, whole_s)
        if found is None:
            return None
        load, times_s = found
        if isinstance(self._tenant, tuple):
            times_s = ((self._tenant[0] * whole_s, self._tenant[1] * whole_s),)
        return Tenant(times_s, load)

    @cached_property
    def lean_grid_gpu_s(self) -> float:
        """GPU-seconds of measuring every point that runs as briefly as one well can: the unit of all costs.

        One start for each num_workers; of each point its set-up, the warm-up and 40 steps.
        """
        starts_gpu_s = self.plant.start_s * sum({int(point["scale.num_workers"]) for point in self._runs})
        return starts_gpu_s + sum(int(point["scale.num_workers"]) * self._lean_s(point) for point in self._runs)

    @cached_property
    def lean_grid_s(self) -> float:
        """The same in seconds, one point after the other."""
        starts_s = self.plant.start_s * len({point["scale.num_workers"] for point in self._runs})
        return starts_s + sum(self._lean_s(point) for point in self._runs)

    def status(self, point: Point) -> str:
        """ok, oom, or infeasible: more CPUs than a node has, or a batch of which some ranks get nothing."""
        setting = self.setting(point)
        ranks = min(setting.num_workers, self.plant.gpus_per_node)
        if self._drawn.reserved and ranks * (1 + setting.loader_workers) > self.plant.cpu.threads:
            return "infeasible"
        if point["data.global_batch_size"] < setting.num_workers:
            return "infeasible"
        return "ok" if self.plant.memory.fits(self.peak_memory_mib(point)) else "oom"

    def peak_memory_mib(self, point: Point) -> float:
        setting = self.setting(point)
        return self.plant.memory.peak_mib(setting.batch, setting.memory)

    def setting(self, point: Point) -> BuildContext:
        num_workers = int(point["scale.num_workers"])
        changes: dict[str, float] = {}
        for key, values in EXTRAS.items():
            changes |= values[point[key]] if key in point else {}
        batch = -(-int(point["data.global_batch_size"]) // num_workers)
        return BuildContext(num_workers, batch, int(point["data.loader_workers"]), **changes)

    def measure(
        self,
        point: Point,
        steps: int,
        rng: np.random.Generator,
        warm_up: int = WARM_UP_STEPS,
        warmth_NG: Floats | None = None,
        load: Callable[[float], Load] | None = None,
    ) -> Measured | str:
        """`steps` steps after `warm_up`, on GPUs of some warmth (without: of the long run's); or why there are none."""
        if (status := self.status(point)) != "ok":
            return status
        luck = Luck.draw(self.plant, warm_up + steps, rng)
        run: Steps = simulate(self.plant, [self.setting(point)], luck, warmth_NG=warmth_NG, load=load)
        phases_s = {phase: seconds_TP[warm_up:, 0] for phase, seconds_TP in run.phases_s_TP.items()}
        steps_s, warmth_TNG = run.steps_s_TP[:, 0], [warmth_PNG[0] for warmth_PNG in run.warmth_TPNG]
        return Measured(steps_s[warm_up:], phases_s, self.peak_memory_mib(point), float(steps_s[:warm_up].sum()), warmth_TNG)

    def truth(self, point: Point) -> float:
        """Mean seconds of a step, see above; infinite where there is none."""
        return self._truths[self.key(point)]

    def figure(self, point: Point, metric: str = "images_per_s") -> float:
        """The truth as a metric; the larger the better, so that times and costs come with a minus."""
        return as_figure(point, self.truth(point), self.plant.num_images, metric)

    def regret(self, point: Point | None, metric: str = "images_per_s") -> float:
        """Share that the best point is better by; 1 for none."""
        best = self._best[metric]
        if point is None or not np.isfinite(self.truth(point)):
            return 1.0
        figure = self.figure(point, metric)
        return 1.0 - figure / best if best > 0 else 1.0 - best / figure

    def front_regret(self, found: Sequence[Point]) -> float:
        """Share by which a point is both faster and cheaper than all that were found; 1 for none."""

        def seconds(point: Point, num_workers: int) -> float:
            """Of an image, or where a point has more than `num_workers` of what they would have to take to cost as little."""
            behind = max(1.0, float(point["scale.num_workers"]) / num_workers)
            return self.truth(point) / float(point["data.global_batch_size"]) * behind

        found = [point for point in found if np.isfinite(self.truth(point))]
        least = (min((seconds(other, p["scale.num_workers"]) for other in found), default=np.inf) for p in self._runs)
        behind = [1.0 - seconds(p, p["scale.num_workers"]) / time_s for p, time_s in zip(self._runs, least, strict=True)]
        return float(max(behind))

    @staticmethod
    def key(point: Point) -> tuple[Any, ...]:
        return tuple(sorted(point.items()))

    @cached_property
    def _runs(self) -> list[Point]:
        return [point for point in self.points if self.status(point) == "ok"]

    @cached_property
    def _best(self) -> dict[str, float]:
        return {metric: max(self.figure(point, metric) for point in self._runs) for metric in METRICS}

    def _lean_s(self, point: Point) -> float:
        return self.plant.setup_s + (WARM_UP_STEPS + LEAN_STEPS) * self.truth(point)

    @cached_property
    def _truths(self) -> dict[tuple[Any, ...], float]:
        """Of every point; those near the top longer."""
        truths = {self.key(point): np.inf for point in self.points}
        truths |= self._long_runs(self._runs, TRUTH_STEPS)
        near: list[Point] = []
        for metric in ("images_per_s", "gpu_s_per_epoch"):
            figures = [as_figure(p, truths[self.key(p)], self.plant.num_images, metric) for p in self._runs]
            least = max(figures) - CONTENDERS * abs(max(figures))
            near += [p for p, figure in zip(self._runs, figures, strict=True) if figure > least and p not in near]
        truths |= self._long_runs(near, LONG_TRUTH_STEPS)
        return truths

    def _long_runs(self, points: list[Point], steps: int) -> dict[tuple[Any, ...], float]:
        luck = Luck.draw(self.plant, SETTLE_STEPS + steps, np.random.default_rng([self.seed, 6]))
        found: dict[tuple[Any, ...], float] = {}
        for group in _groups(points):
            run = simulate(self.plant, [self.setting(point) for point in group], luck)
            means_P = run.steps_s_TP[SETTLE_STEPS:].mean(0)
            found |= {self.key(point): float(mean) for point, mean in zip(group, means_P, strict=True)}
        return found


def as_figure(point: Point, step_s: float, num_images: int, metric: str) -> float:
    """A step's time as a metric, the larger the better.

    Raises:
        ValueError: no such metric.
    """
    images_per_s = point["data.global_batch_size"] / step_s
    if metric == "images_per_s":
        return float(images_per_s)
    epoch_s = num_images / images_per_s if images_per_s else np.inf
    if metric == "epoch_s":
        return -float(epoch_s)
    if metric == "gpu_s_per_epoch":
        return -float(epoch_s * point["scale.num_workers"])
    raise ValueError(f"no metric {metric!r}: choose from {', '.join(METRICS)}")


def _groups(points: list[Point]) -> Iterator[list[Point]]:
    """Points of one GPU count each."""
    for num_workers in sorted({int(point["scale.num_workers"]) for point in points}):
        yield [point for point in points if point["scale.num_workers"] == num_workers]
