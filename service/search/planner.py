"""Which point of a sweep to probe next, so that the best one is found for little GPU time.

A few probes where the step-time model learns most; then those with the best expected gain a GPU-second; then the best point's
neighbours, in case the model is wrong about them; then the leading points again, in turn, until it is clear enough which one is
the best. Now and then a point that is known is measured again, which shows whether the cluster is still what it was. Nothing here
knows who runs a probe.

Shapes: M points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from service.config.space import GLOBAL_BATCH
from service.search.budget import ProbeCosts
from service.search.disturbance import excess
from service.search.fit_data import Measured
from service.search.formulas import step_times
from service.search.infeasible import RAN, failing, lost, unschedulable, values
from service.search.memory_model import MemoryModel
from service.search.pareto_front import behind, front
from service.search.points import Array, Flags, Hardware, Observation, Point, categories, identity
from service.search.posterior import Posterior, posterior_of
from service.search.probes import MeanStepTime
from service.search.proposals import MIN_WIN_PROBABILITY, Proposal, Proposals, first_probe
from service.search.step_time_model import StepTime

__all__ = ["Forecast", "Hardware", "Observation", "Planner", "Point"]

METRICS = {"images_per_s": 0, "epoch_s": 0, "gpu_s_per_epoch": 1, "pareto": 0}  # power of num_workers in what one image costs
FIRST_PROBES = 4  # by optimal design, before gains are compared
MIN_PROBE_STEPS = 8
STOP_ERROR, STOP_ERROR_REPEAT = 0.03, 0.015  # a probe ends when its mean is known so well (relative, 95%); one of a known point
STOP_ERROR_BEHIND, MAX_STOP_ERROR = 0.25, 0.1  # of a point that is 20% behind the best 5% more will do; and at most so much
MIN_RUN_CHANCE = 0.02  # points that are less likely to run are left out
RUN_CHANCE_AFTER = {"failed": 0.5, "oom": 0.0, "infeasible": 0.5}  # of a point that ended so


@dataclass(frozen=True)
class Forecast:
    """Of one point, in seconds of a step; the parts as the model has them, before its residuals."""

    point: Point
    step_s: float
    sd: float  # of the step, relative
    measured: bool
    supply_s: float  # what the loader alone would take
    work_s: float  # everything but the wait for data
    forward_s: float
    local_s: float  # one worker's own work, nobody waited for
    exposed_s: float  # all-reduce that the backward does not hide


class Planner:
    """Proposes points (`ask`) and takes up what they brought (`tell`); from the same observations follows the same next point.

    A point may be proposed again, and has as many observations as it was measured.
    """

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
        columns = [tuple(column) for column in self.layout.member_KM.T]
        kinds = {column: kind for kind, column in enumerate(dict.fromkeys(columns))}
        self.kind_M = np.array([kinds[column] for column in columns])
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
        self._why = "nothing was measured yet"

    def tell(self, point: Point, observation: Observation) -> None:
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
            self.measured = Measured.of(self.layout.take(rows), [one for _, one in self._ok()])
            self.model = self.prior.fitted(self.measured)

    def ask(self, group: float | None = None) -> Point | None:
        """The next point to probe; None when no further probe is worth it, or none is left.

        `group` is the num_workers of the group that would probe it: a point with as many pays for no start.
        """
        num_ok, proposal = len(self._ok()), Proposal(None, self._why)
        if num_ok + len(self.pending) < FIRST_PROBES or not num_ok:
            proposal = first_probe(self, group)
        if proposal.row is None and num_ok:
            proposal = Proposals(self, group).next()
        self._why = proposal.why
        if proposal.row is None:
            self._why += self._left_out()
            return None
        self.pending.append(proposal.row)
        return self.points[proposal.row]

    def should_stop(self, steps_s: Sequence[float], point: Point | None = None) -> bool:
        """Whether a probe's mean step time is known well enough, or the probe has had its steps; no point: the one pending.

        That is to 3%, of a point that was measured before to 1.5%; what is far from the best is worth no long probe (Maron and
        Moore 1994, "Hoeffding races").
        """
        count = len(steps_s)
        row = self.row[identity(point)] if point is not None else self.pending[0] if len(self.pending) == 1 else None
        # Loader workers that make a batch each deliver in bursts: a mean needs one from each of them.
        floor = MIN_PROBE_STEPS if row is None else max(MIN_PROBE_STEPS, self.layout.threads_M[row])
        if not floor <= count < self.max_steps:
            return count >= self.max_steps
        mean, known = self.measured.slow.mean(steps_s), STOP_ERROR
        rows = [row for row, _ in self._ok()]
        if row is not None and rows:
            least_O = self.measured.logs_3M[0] + self.offset_M[rows]
            if self.along_front:
                least_O += behind(self.layout.workers_M[[row]], self.layout.workers_M[rows])[:, 0]
            late = math.log(mean.step_s) + self.offset_M[row] - float(least_O.min())
            if row in rows and count >= 2 * floor and self._is_disturbed(row, mean):
                return True
            known = STOP_ERROR_REPEAT if row in rows else STOP_ERROR
            known = min(known + STOP_ERROR_BEHIND * max(late, 0.0), MAX_STOP_ERROR)
        return 1.96 * mean.error <= known

    def best(self) -> Point | None:
        """The best measured point, by its own measurements, its neighbours' and the model; None where nothing ran."""
        return self.points[self.posterior().best] if self._ok() else None

    def front(self) -> list[Point]:
        """The measured points that no other one beats in speed and cost, the fewest workers first."""
        if not self._ok():
            return []
        posterior = self.posterior()
        workers_U, time_U = self.layout.workers_M[posterior.rows_U], posterior.cost_U - self.cost_M[posterior.rows_U]
        return [self.points[posterior.rows_U[index]] for index in front(workers_U, time_U)]

    def bound(self) -> float:
        """No untested point is expected to run and to be better by more than this share, each with a probability of 95%.

        Better than the best measured one, or with the metric `pareto` than those that keep it off the front. What was left out
        counts with the chance that it can run. Infinite where nothing ran.
        """
        if not self._ok():
            return math.inf
        untested_M = self.untested_M
        return self.posterior().bound(untested_M, self.chances(), MIN_WIN_PROBABILITY) if untested_M.any() else 0.0

    def forecasts(self) -> list[Forecast]:
        """The posterior of every point, in the order of `points`; before anything ran, what a cluster usually is like."""
        parts = step_times(self.model.mean_P, self.layout)
        if self._ok():
            posterior = self.posterior()
            step_s_M, sd_M = posterior.step_s_M, posterior.spread_M
        else:
            guess = self.model.predict(self.points)
            step_s_M, sd_M = guess.step_s, guess.step_sd_s / guess.step_s
        columns = (step_s_M, sd_M, ~self.untested_M, parts.supply, parts.work, parts.forward, parts.local, parts.exposed)
        return [Forecast(*row) for row in zip(self.points, *(column.tolist() for column in columns), strict=True)]

    def why(self) -> str:
        """Why the last answer of `ask` was given, in a sentence."""
        return self._why

    def posterior(self) -> Posterior:
        """The posterior of all points, in the order of `points`. Needs a point that ran."""
        key = (len(self.history), tuple(self.pending))
        if self._posterior is None or self._posterior[0] != key:
            ended = [(turn, row) for turn, (row, observation) in enumerate(self.history) if observation.status == "ok"]
            self._posterior = (
                key,
                posterior_of(
                    self.prior,
                    self.model,
                    self.measured,
                    rows=[row for _, row in ended],
                    ages=[len(self.history) - turn for turn, _ in ended],
                    pending=self.pending,
                    layout=self.layout,
                    offset_M=self.offset_M,
                    seed=(self.seed, len(self.history), len(self.pending)),
                    along_front=self.along_front,
                    lost_M=lost(self.layout, self.history),
                ),
            )
        return self._posterior[1]

    def chances(self) -> Array:
        """The probability that each point can run, in the order of `points`."""
        chance_M = self.memory.chances(self.kind_M, self.layout.batch_M)
        chance_M[unschedulable(self.layout, self.history) | failing(self.layout, self.values, self.history)] *= MIN_RUN_CHANCE
        for row, observation in self.history:
            if observation.status in RUN_CHANCE_AFTER:
                chance_M[row] *= RUN_CHANCE_AFTER[observation.status]
        chance_M[self.measured_rows] = 1.0
        return chance_M

    def _is_disturbed(self, row: int, mean: MeanStepTime) -> bool:
        """Whether a point is so much slower than it was before that more steps would say no more of it."""
        before = [at for at, earlier in enumerate(self.measured_rows) if earlier == row]
        logs_R = np.append(self.measured.logs_3M[0, before], math.log(mean.step_s))
        return bool(excess(logs_R, np.append(self.measured.noise_M[before], mean.error))[-1] > 0)

    def _ok(self) -> list[tuple[int, Observation]]:
        return [(row, observation) for row, observation in self.history if observation.status == "ok"]

    @property
    def measured_rows(self) -> list[int]:
        """Of each measurement, in order."""
        return [row for row, _ in self._ok()]

    @property
    def usual_steps(self) -> float:
        """What a probe of a new point takes, past its warm-up."""
        return float(np.mean([len(observation.steps_s) for _, observation in self._ok()] or [2 * MIN_PROBE_STEPS]))

    @property
    def untested_M(self) -> Flags:
        """Points that never ran."""
        untested_M = np.ones(len(self.points), dtype=bool)
        untested_M[self.measured_rows] = False
        return untested_M

    def is_open(self, chance_M: Array) -> Flags:
        """Not measured, not pending, and not left out since they most likely cannot run."""
        open_M = self.untested_M & (chance_M > MIN_RUN_CHANCE)
        open_M[self.pending] = False
        return open_M

    def _left_out(self) -> str:
        """What the search has not tried since it most likely cannot run, as the end of a sentence."""
        left_M = self.untested_M & (self.chances() <= MIN_RUN_CHANCE)
        no_room_M = left_M & unschedulable(self.layout, self.history)
        fails_M = left_M & failing(self.layout, self.values, self.history) & ~no_room_M
        parts = (
            (left_M & ~no_room_M & ~fails_M, "not to fit into memory"),
            (no_room_M, "to find no room on the cluster"),
            (fails_M, "to fail"),
        )
        counted = [f"{int(which_M.sum())} {what}" for which_M, what in parts if which_M.any()]
        return f"; expected of those left out: {', '.join(counted)}" if counted else ""
