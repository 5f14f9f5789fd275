"""Which point of a sweep to probe next, so that the best one is found for little GPU time.

A few probes where the step-time model learns most; then those with the best expected gain a GPU-second; then the best point's
neighbours, in case the model is wrong about them. It ends when nothing is believed to beat the best by more than the tolerance.
Nothing here knows who runs a probe.

Shapes: M points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from service.search.belief import Belief, believe
from service.search.broken import blamed, lost, placeless, values
from service.search.design import information
from service.search.forecast import Forecast, forecasts
from service.search.formulas import times
from service.search.front import behind, front
from service.search.measured import Measured
from service.search.memory_model import MemoryModel
from service.search.neighbours import unchecked
from service.search.points import (
    GLOBAL_BATCH,
    Array,
    Flags,
    Hardware,
    Observation,
    Point,
    categories,
    identity,
    named,
)
from service.search.step_time import StepTime

__all__ = ["Forecast", "Guided", "Hardware", "Observation", "Point"]

METRICS = {"images_per_s": 0, "epoch_s": 0, "gpu_s_per_epoch": 1, "pareto": 0}  # power of num_workers in what one image costs
FIRST_PROBES = 4  # by optimal design, before gains are compared
DOUBT = 0.05  # a point stays worth a probe while it beats the best by more than the tolerance with this probability
PRICE = 0.3  # expected gain that a probe as dear as the whole grid would need: 0.1% for 1/300 of the grid
FREE_SHARE, DEAR = 0.06, 0.5  # beyond this share of the grid's GPU time a doubt or a check is worth no probe, and a gain less
KNOWN, FLOOR_STEPS = 0.03, 8  # a probe ends when the mean is known to 3% (95% of the time), but not before these steps
KNOWN_BEHIND, KNOWN_AT_MOST = 0.25, 0.1  # one that is 20% behind the best need only be known to 3% + 5%
WARM_UP_STEPS, GRID_STEPS = 10, 250  # that every probe pays for and does not count; of a point of the grid, to compare with


class Guided:
    """Asked for points, told what they brought; the same tells in the same order give the same next point."""

    def __init__(
        self,
        points: Sequence[Point],
        hardware: Hardware,
        *,
        metric: str = "images_per_s",
        tolerance: float = 0.03,
        seed: int = 0,
        max_steps: int = 60,
        start_s: float = 25.0,
        factor: Callable[[Point], float] = lambda point: 1.0,
    ) -> None:
        """`max_steps` bounds one probe; `start_s` is what a new group of workers takes before its first step, until one is told.

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
        self.starts_s, self.usual_start_s = list[float](), start_s
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
        self.told: list[tuple[int, Observation]] = []
        self.pending: list[int] = []
        self.model = self.prior
        self.measured = Measured.of(self.layout.take([]), [])
        self.spent_gpu_s = 0.0  # as far as the planner can tell
        self._why = "nothing was measured yet"

    def tell(self, point: Point, seen: Observation) -> None:
        """Take up what a point brought, in any order, asked for or not.

        Raises:
            KeyError: the point is none of the sweep's.
        """
        row = self.row[identity(point)]
        if row in self.pending:
            self.pending.remove(row)
        if seen.status == "ok" and not len(seen.steps_s):
            seen = Observation("failed")
        workers, batch = float(self.layout.workers_M[row]), float(self.layout.batch_M[row])
        last = self.layout.workers_M[self.told[-1][0]] if self.told else None
        if seen.status != "infeasible":
            if seen.start_s:
                self.starts_s.append(seen.start_s)
            start_s = seen.start_s if seen.start_s is not None else 0.0 if last == workers else self.start_s
            warm_up_s = WARM_UP_STEPS * float(np.mean(seen.steps_s)) if len(seen.steps_s) else 0.0
            self.spent_gpu_s += workers * (start_s + warm_up_s + float(sum(seen.steps_s)))
        self.told.append((row, seen))
        if seen.status in ("ok", "oom"):
            self.memory.tell(int(self.kind_M[row]), batch, seen.peak_memory_mib, seen.gpu_memory_mib, seen.status == "oom")
        if seen.status == "ok":
            pairs = self._ok()
            self.measured = Measured.of(self.layout.take([row for row, _ in pairs]), [one for _, one in pairs])
            self.model = self.prior.fitted(self.measured)

    @property
    def start_s(self) -> float:
        """Seconds that a new group of workers takes."""
        return float(np.median(self.starts_s)) if self.starts_s else self.usual_start_s

    def ask(self, group: float | None = None) -> Point | None:
        """The next point to probe; None when no further probe is worth it, or none is left.

        `group` is the num_workers of the group that would probe it: a point with as many pays for no start.
        """
        open_M = self._open()
        if not open_M.any():
            self._why = "every point that can run was measured"
            return None
        begins = len(self._ok()) + len(self.pending) < FIRST_PROBES or not self._ok()
        row = self._first(open_M, group) if begins else self._next(open_M, group)
        if row is None:
            return None
        self.pending.append(row)
        return self.points[row]

    def enough(self, steps_s: Sequence[float], point: Point | None = None) -> bool:
        """Whether a probe's mean step time is known to 3%, or the probe has had its steps; without a point, of the one pending.

        What is far from the best is worth no long probe (Maron and Moore 1994, "Hoeffding races").
        """
        count = len(steps_s)
        if not FLOOR_STEPS <= count < self.max_steps:
            return count >= self.max_steps
        mean, known = self.measured.slow.mean(steps_s), KNOWN
        row = self.row[identity(point)] if point is not None else self.pending[0] if len(self.pending) == 1 else None
        rows = [row for row, _ in self._ok()]
        if row is not None and rows:
            least_O = self.measured.logs_3M[0] + self.offset_M[rows]
            if self.along_front:
                least_O += behind(self.layout.workers_M[[row]], self.layout.workers_M[rows])[:, 0]
            late = math.log(mean.step_s) + self.offset_M[row] - float(least_O.min())
            known = min(KNOWN + KNOWN_BEHIND * max(late, 0.0), KNOWN_AT_MOST)
        return 1.96 * mean.error <= known

    def best(self) -> Point | None:
        """The best measured point, its neighbours' and the model's word taken into account; None where nothing ran."""
        return self.points[self.belief().best] if self._ok() else None

    def front(self) -> list[Point]:
        """The measured points that no other one beats in speed and cost, the fewest workers first."""
        if not self._ok():
            return []
        belief = self.belief()
        workers_O, time_O = self.layout.workers_M[belief.rows_O], belief.cost_O - self.cost_M[belief.rows_O]
        return [self.points[belief.rows_O[place]] for place in front(workers_O, time_O)]

    def bound(self) -> float:
        """No untested point is believed to be better by more than this share, each with a probability of 95%.

        Better than the best measured one, or with the metric `pareto` than those that keep it off the front. 0.0 where no
        point is left to test, infinite where nothing ran.
        """
        open_M = self._open()
        if not open_M.any():
            return 0.0
        return self.belief().bound(open_M, DOUBT) if self._ok() else math.inf

    def forecasts(self) -> list[Forecast]:
        """What is believed of every point, in the order of `points`; before anything ran, what a cluster usually is like."""
        parts = times(self.model.mean_P, self.layout)
        if self._ok():
            belief = self.belief()
            step_s_M, sd_M = belief.step_s_M, belief.spread_M
        else:
            guess = self.model.predict(self.points)
            step_s_M, sd_M = guess.step_s, guess.step_sd_s / guess.step_s
        measured_M = np.zeros(len(self.points), dtype=bool)
        measured_M[[row for row, _ in self._ok()]] = True
        return forecasts(self.points, step_s_M, sd_M, measured_M, parts)

    def why(self) -> str:
        """Why the last answer of `ask` was given, in a sentence."""
        return self._why

    def belief(self) -> Belief:
        """What is believed of all points, in the order of `points`. Needs a point that ran."""
        told = [(place, row) for place, (row, seen) in enumerate(self.told) if seen.status == "ok"]
        rows, ages = [row for _, row in told], [len(self.told) - place for place, _ in told]
        seed = (self.seed, len(self.told), len(self.pending))
        return believe(
            self.prior,
            self.model,
            self.measured,
            rows,
            ages,
            self.pending,
            self.layout,
            self.offset_M,
            seed,
            self.along_front,
            lost(self.layout, self.told),
        )

    def _ok(self) -> list[tuple[int, Observation]]:
        return [(row, seen) for row, seen in self.told if seen.status == "ok"]

    def _name(self, row: int) -> str:
        return named(self.points[row])

    def _fits(self) -> Flags:
        return self.memory.fits(self.kind_M, self.layout.batch_M)

    def _open(self) -> Flags:
        """Neither told nor pending, in memory, with a place on the cluster, and without what only ever failed."""
        open_M = self._fits()
        open_M[[row for row, _ in self.told] + self.pending] = False
        open_M &= ~placeless(self.layout, self.told)
        open_M &= ~blamed(self.layout, self.values, self.told)
        return open_M

    def _cost(self, step_s_M: Array, group: float | None) -> Array:
        """GPU-seconds of a probe of each point."""
        lengths = [len(seen.steps_s) for _, seen in self._ok()] or [2 * FLOOR_STEPS]
        start_M = np.where(self.layout.workers_M == group, 0.0, self.start_s)
        return self.layout.workers_M * (start_M + (WARM_UP_STEPS + float(np.mean(lengths))) * step_s_M)

    def _first(self, open_M: Flags, group: float | None) -> int:
        """The point that tells most for its cost, the batches small as long as little is known of memory."""
        gain_M = information(self.model, self.layout, self.pending)
        if self.memory.capacity_mib == np.inf:  # begin in the lower half
            open_M = open_M & (self.layout.batch_M <= np.median(self.layout.batch_M[open_M]))
        elif self.memory.is_line_unknown():  # no bigger batch is tried before two peaks give the line
            other_M = np.zeros_like(open_M)
            for kind, peaks in self.memory.seen.items():
                other_M |= (self.kind_M == kind) & ~np.isin(self.layout.batch_M, list(peaks))
            open_M = open_M & other_M if (open_M & other_M).any() else open_M
        cost_M = self._cost(times(self.model.mean_P, self.layout).step, group)
        row = int(np.argmax(np.where(open_M, gain_M / np.sqrt(cost_M), -1.0)))
        self._why = f"{self._name(row)} tells most about what a step is made of, for its GPU time"
        return row

    def _neighbours(self, belief: Belief, open_M: Flags) -> list[int]:
        tried_M = np.zeros_like(open_M)
        tried_M[[row for row, _ in self.told] + self.pending] = True
        bests = dict.fromkeys(belief.rival_M.tolist())
        return [row for best in bests for row in unchecked(self.layout, self.global_M, belief, best, open_M, tried_M)]

    def _next(self, open_M: Flags, group: float | None) -> int | None:
        belief = self.belief()
        cost_M, gain_M, beats_M = self._cost(belief.step_s_M, group), belief.gain_M(), belief.beats_M(self.tolerance)
        whole_M = self.layout.workers_M * (self.start_s + GRID_STEPS * belief.step_s_M)
        whole = float(whole_M[self._fits()].sum())
        free_M = self.spent_gpu_s + cost_M < FREE_SHARE * whole
        worth_M = open_M & ((free_M & (beats_M > DOUBT)) | (gain_M > np.where(free_M, PRICE, DEAR) * cost_M / whole))
        if worth_M.any():
            row = int(np.argmax(np.where(worth_M, gain_M / cost_M, -1.0)))
            self._why = (
                f"{self._name(row)} is expected to gain {gain_M[row]:.1%} on {self._name(belief.rival_M[row])}, and beats it by "
                f"more than {self.tolerance:.0%} with a probability of {beats_M[row]:.0%}"
            )
            return row
        if checks := [row for row in self._neighbours(belief, open_M) if free_M[row]]:
            row = min(checks, key=lambda row: float(cost_M[row]))
            rival = self._name(belief.rival_M[row])
            self._why = f"{self._name(row)} is checked as a neighbour of {rival}, which the model believes to be better"
            return row
        chance = float(np.max(beats_M[open_M]))
        best = "those of the front of speed and cost" if self.along_front else self._name(belief.best)
        ends = "no untested point is believed to be" if chance <= DOUBT else "no probe is worth its GPU time any more to find one"
        self._why = (
            f"{ends} more than {self.tolerance:.0%} better than {best}; the likeliest is so with a probability of {chance:.1%}"
        )
        return None
