"""What a search knows: its points as numbers, what was measured, and what follows for every point.

Shapes: M points.
"""

from collections.abc import Callable, Sequence

import numpy as np

from service.config.space import GLOBAL_BATCH
from service.search.budget import ProbeCosts
from service.search.fit_data import Measured
from service.search.infeasible import RAN, chances_after_failures, lost_with_nodes, unschedulable, values
from service.search.memory_model import MemoryModel, kinds_of
from service.search.points import Array, Flags, Hardware, Observation, Point, categories, identity
from service.search.posterior import Posterior, posterior_of
from service.search.step_time_model import StepTime

METRICS = {"images_per_s": 0, "epoch_s": 0, "gpu_s_per_epoch": 1, "pareto": 0}  # power of num_workers in what one image costs
MIN_PROBE_STEPS = 8
MIN_RUN_CHANCE = 0.02  # points that are less likely to run are left out
RUN_CHANCE_AFTER = {"oom": 0.0, "infeasible": 0.5}  # of a point that ended so


class SearchState:
    """The points and the history of a search; from the same observations follows the same posterior."""

    def __init__(
        self,
        points: Sequence[Point],
        hardware: Hardware,
        *,
        metric: str = "images_per_s",
        tolerance: float = 0.03,
        seed: int = 0,
        max_steps: int = 60,
        warmup_steps: int = 5,
        start_s: float = 25.0,
        factor: Callable[[Point], float] = lambda point: 1.0,
    ) -> None:
        """`max_steps` bounds one probe, `warmup_steps` are those that it runs before; `start_s` is what a new group of workers
        takes before its first step, until one is known.

        `factor` is what a point's seconds for an image are multiplied by, such as the images that a batch needs to a target.
        The metric `pareto` asks for the front of speed and cost: the best of each num_workers that none beats in both.

        Raises:
            ValueError: no points, or a metric that is none of `METRICS`.
            KeyError: a point without scale.num_workers, data.global_batch_size or data.loader_workers.
        """
        if not points:
            raise ValueError("a search needs at least one point")
        if metric not in METRICS:
            raise ValueError(f"metric {metric} cannot be searched for: write one of {', '.join(METRICS)}")
        self.tolerance, self.seed, self.max_steps, self.along_front = tolerance, seed, max_steps, metric == "pareto"
        self.costs = ProbeCosts(warmup_steps, max_steps, start_s)
        self.points = list({identity(point): point for point in points}.values())
        self.row = {identity(point): row for row, point in enumerate(self.points)}
        self.prior = StepTime.prior(hardware, categories(self.points))
        self.layout = self.prior.layout(self.points)
        self.kind_M = kinds_of(self.layout)
        self.global_M = np.array([float(point[GLOBAL_BATCH]) for point in self.points])
        self.cost_M = METRICS[metric] * np.log(self.layout.workers_M)  # cost of a second, in logarithms
        self.offset_M = self.cost_M - np.log(self.global_M) + np.log([factor(point) for point in self.points])
        self.values = values(self.points)
        self.memory = MemoryModel()
        self.history: list[tuple[int, Observation]] = []
        self.pending: list[int] = []
        self.model = self.prior
        self.measured = Measured.of(self.layout.take([]), [])
        self._posterior: tuple[tuple[object, ...], Posterior] | None = None

    def add(self, point: Point, observation: Observation) -> None:
        """Take up what a point brought, in any order, proposed or not, once more or for the first time.

        Raises:
            KeyError: the point is none of the sweep's.
        """
        row = self.row[identity(point)]
        if row in self.pending:
            self.pending.remove(row)
        if observation.status == "ok" and not len(observation.steps_s):
            observation = Observation("failed", start_s=observation.start_s, seconds=observation.seconds)
        workers, batch = float(self.layout.workers_M[row]), float(self.layout.batch_M[row])
        same_group = bool(self.history) and self.layout.workers_M[self.history[-1][0]] == workers
        self.costs.add(workers, observation, same_group, again=row in self.measured_rows)
        self.history.append((row, observation))
        if observation.status in RAN:
            peak, capacity = observation.peak_memory_mib, observation.gpu_memory_mib
            self.memory.add(int(self.kind_M[row]), batch, peak, capacity, observation.status == "oom")
        if observation.status == "ok":
            rows = self.measured_rows
            self.measured = Measured.of(self.layout.take(rows), [one for _, one in self.measurements])
            self.model = self.prior.fitted(self.measured)

    def posterior(self) -> Posterior:
        """The posterior of all points, in the order of `points`. Needs a point that ran."""
        key = (len(self.history), tuple(self.pending))
        if self._posterior is None or self._posterior[0] != key:
            self._posterior = (
                key,
                posterior_of(
                    self.prior,
                    self.model,
                    self.measured,
                    rows=self.measured_rows,
                    ages=[len(self.history) - turn for turn in self.turns],
                    pending=self.pending,
                    layout=self.layout,
                    offset_M=self.offset_M,
                    seed=(self.seed, len(self.history), len(self.pending)),
                    along_front=self.along_front,
                    lost_M=lost_with_nodes(self.layout, self.history),
                ),
            )
        return self._posterior[1]

    def chances(self) -> Array:
        """The probability that each point can run, in the order of `points`."""
        chance_M = self.memory.chances(self.kind_M, self.layout.batch_M)
        chance_M *= chances_after_failures(self.layout, self.values, self.history)
        chance_M[unschedulable(self.layout, self.history)] *= MIN_RUN_CHANCE
        for row, observation in self.history:
            if observation.status in RUN_CHANCE_AFTER:
                chance_M[row] *= RUN_CHANCE_AFTER[observation.status]
        chance_M[self.measured_rows] = 1.0
        return chance_M

    @property
    def measurements(self) -> list[tuple[int, Observation]]:
        """Row and observation of each measurement, in order."""
        return [(row, observation) for row, observation in self.history if observation.status == "ok"]

    @property
    def measured_rows(self) -> list[int]:
        """Of each measurement, in order."""
        return [row for row, _ in self.measurements]

    @property
    def has_runnable(self) -> bool:
        """Whether a point was measured that can still run: whose nodes are there, as far as is known."""
        return not lost_with_nodes(self.layout, self.history)[self.measured_rows].all()

    @property
    def turns(self) -> list[int]:
        """Of each measurement, its place in the history."""
        return [turn for turn, (_, observation) in enumerate(self.history) if observation.status == "ok"]

    @property
    def usual_steps(self) -> float:
        """What a probe of a new point takes, past its warm-up."""
        return float(np.mean([len(observation.steps_s) for _, observation in self.measurements] or [2 * MIN_PROBE_STEPS]))

    @property
    def untested_M(self) -> Flags:
        """Points that never ran."""
        untested_M = np.ones(len(self.points), dtype=bool)
        untested_M[self.measured_rows] = False
        return untested_M

    def candidates_M(self, chance_M: Array) -> Flags:
        """Points that are not measured, not pending, and not left out since they most likely cannot run."""
        new_M = self.untested_M & (chance_M > MIN_RUN_CHANCE)
        new_M[self.pending] = False
        return new_M

    def left_out(self) -> str:
        """What the search has not tried since it most likely cannot run, as the end of a sentence."""
        left_M = self.untested_M & (self.chances() <= MIN_RUN_CHANCE)
        no_room_M = left_M & unschedulable(self.layout, self.history)
        fails_M = left_M & (chances_after_failures(self.layout, self.values, self.history) <= MIN_RUN_CHANCE) & ~no_room_M
        parts = (
            (left_M & ~no_room_M & ~fails_M, "not to fit into memory"),
            (no_room_M, "to find no room on the cluster"),
            (fails_M, "to fail"),
        )
        counted = [f"{int(which_M.sum())} {what}" for which_M, what in parts if which_M.any()]
        return f"; expected of those left out: {', '.join(counted)}" if counted else ""
