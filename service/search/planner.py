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

import numpy as np

from service.config.space import GLOBAL_BATCH
from service.search.budget import Budget
from service.search.disturbance import excess, second_look
from service.search.first_probes import information
from service.search.fit_data import Measured
from service.search.formulas import times
from service.search.infeasible import RAN, failing, lost, unschedulable, values
from service.search.memory_model import MemoryModel
from service.search.neighbours import unchecked
from service.search.pareto_front import behind, front
from service.search.points import Array, Flags, Hardware, Observation, Point, categories, identity, named
from service.search.posterior import Posterior, posterior_of
from service.search.prediction_rows import Forecast, forecasts
from service.search.probe_cost import Costs
from service.search.probes import Mean
from service.search.remeasure import MOST_LOOKS, Contest
from service.search.step_time_model import StepTime

__all__ = ["Forecast", "Hardware", "Observation", "Planner", "Point"]

METRICS = {"images_per_s": 0, "epoch_s": 0, "gpu_s_per_epoch": 1, "pareto": 0}  # power of num_workers in what one image costs
FIRST_PROBES = 4  # by optimal design, before gains are compared
DOUBT = 0.05  # a point stays worth a probe while it beats the best by more than the tolerance with this probability
PRICE = 0.05  # expected gain that a probe as dear as a lean grid would need
FREE_SHARE, DEAR = 0.10, 0.3  # beyond this share of a lean grid, and its starts, a doubt is worth no probe, and a gain less
CHECK_SHARE = 0.15  # the same for the neighbours' checks
FARTHER = 0.35  # by how much worse (in logarithms) than a neighbour a value is expected to be that is checked while it is cheap
CONTEST_PRICE = 1.5  # loss of taking the leader for the best that a probe of it as dear as a lean grid would need
SECOND_LOOK_PRICE = 0.3  # the same of what may have been disturbed
ANCHOR_EVERY = 8  # probes after which a known point is measured again
KNOWN, FLOOR_STEPS = 0.03, 8  # a probe ends when the mean is known to 3% (95% of the time), but not before these steps
KNOWN_AGAIN = 0.015  # one of a point that was measured before
KNOWN_BEHIND, KNOWN_AT_MOST = 0.25, 0.1  # one that is 20% behind the best need only be known to 3% + 5%
LIKELY = 0.9  # chance to run of what is checked only in case the model is wrong
HOPELESS = 0.02  # chance to run of what is left alone for what others of its kind met
CHANCE_AFTER = {"failed": 0.5, "oom": 0.0, "infeasible": 0.5}  # to run, of a point that ended so


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
        self.costs = Costs(warmup_steps, max_steps, start_s)
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
        self.costs.add(workers, observation, same_group, again=row in self._measured_rows())
        self.history.append((row, observation))
        if observation.status in RAN:
            peak, capacity = observation.peak_memory_mib, observation.gpu_memory_mib
            self.memory.add(int(self.kind_M[row]), batch, peak, capacity, observation.status == "oom")
        if observation.status == "ok":
            rows = self._measured_rows()
            self.measured = Measured.of(self.layout.take(rows), [one for _, one in self._ok()])
            self.model = self.prior.fitted(self.measured)

    @property
    def spent_gpu_s(self) -> float:
        """GPU-seconds so far, as far as the planner can tell."""
        return self.costs.spent_gpu_s

    @property
    def start_s(self) -> float:
        """Seconds that a new group of workers takes."""
        return self.costs.start_s

    def ask(self, group: float | None = None) -> Point | None:
        """The next point to probe; None when no further probe is worth it, or none is left.

        `group` is the num_workers of the group that would probe it: a point with as many pays for no start.
        """
        begins = len(self._ok()) + len(self.pending) < FIRST_PROBES or not self._ok()
        row = self._first(group) if begins else None
        if row is None and self._ok():
            row = self._next(group)
        if row is None:
            self._why += self._left_out()
            return None
        self.pending.append(row)
        return self.points[row]

    def should_stop(self, steps_s: Sequence[float], point: Point | None = None) -> bool:
        """Whether a probe's mean step time is known well enough, or the probe has had its steps; no point: the one pending.

        That is to 3%, of a point that was measured before to 1.5%; what is far from the best is worth no long probe (Maron and
        Moore 1994, "Hoeffding races").
        """
        count = len(steps_s)
        row = self.row[identity(point)] if point is not None else self.pending[0] if len(self.pending) == 1 else None
        # Loader workers that make a batch each deliver in bursts: a mean needs one from each of them.
        floor = FLOOR_STEPS if row is None else max(FLOOR_STEPS, self.layout.threads_M[row])
        if not floor <= count < self.max_steps:
            return count >= self.max_steps
        mean, known = self.measured.slow.mean(steps_s), KNOWN
        rows = [row for row, _ in self._ok()]
        if row is not None and rows:
            least_O = self.measured.logs_3M[0] + self.offset_M[rows]
            if self.along_front:
                least_O += behind(self.layout.workers_M[[row]], self.layout.workers_M[rows])[:, 0]
            late = math.log(mean.step_s) + self.offset_M[row] - float(least_O.min())
            if row in rows and count >= 2 * floor and self._is_disturbed(row, mean):
                return True
            known = min((KNOWN_AGAIN if row in rows else KNOWN) + KNOWN_BEHIND * max(late, 0.0), KNOWN_AT_MOST)
        return 1.96 * mean.error <= known

    def best(self) -> Point | None:
        """The best measured point, its neighbours' and the model's word taken into account; None where nothing ran."""
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
        untested_M = self._untested()
        return self.posterior().bound(untested_M, self.chances(), DOUBT) if untested_M.any() else 0.0

    def forecasts(self) -> list[Forecast]:
        """The posterior of every point, in the order of `points`; before anything ran, what a cluster usually is like."""
        parts = times(self.model.mean_P, self.layout)
        if self._ok():
            posterior = self.posterior()
            step_s_M, sd_M = posterior.step_s_M, posterior.spread_M
        else:
            guess = self.model.predict(self.points)
            step_s_M, sd_M = guess.step_s, guess.step_sd_s / guess.step_s
        return forecasts(self.points, step_s_M, sd_M, ~self._untested(), parts)

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
                    [row for _, row in ended],
                    [len(self.history) - turn for turn, _ in ended],
                    self.pending,
                    self.layout,
                    self.offset_M,
                    (self.seed, len(self.history), len(self.pending)),
                    self.along_front,
                    lost(self.layout, self.history),
                ),
            )
        return self._posterior[1]

    def chances(self) -> Array:
        """The probability that each point can run, in the order of `points`."""
        chance_M = self.memory.chances(self.kind_M, self.layout.batch_M)
        chance_M[unschedulable(self.layout, self.history) | failing(self.layout, self.values, self.history)] *= HOPELESS
        for row, observation in self.history:
            if observation.status in CHANCE_AFTER:
                chance_M[row] *= CHANCE_AFTER[observation.status]
        chance_M[self._measured_rows()] = 1.0
        return chance_M

    def _is_disturbed(self, row: int, mean: Mean) -> bool:
        """Whether a visit to a point is so much slower than an earlier one that more steps would say no more of the point."""
        visits = [at for at, earlier in enumerate(self._measured_rows()) if earlier == row]
        logs_V = np.append(self.measured.logs_3M[0, visits], math.log(mean.step_s))
        return bool(excess(logs_V, np.append(self.measured.noise_M[visits], mean.error))[-1] > 0)

    def _ok(self) -> list[tuple[int, Observation]]:
        return [(row, observation) for row, observation in self.history if observation.status == "ok"]

    def _measured_rows(self) -> list[int]:
        return [row for row, _ in self._ok()]

    def _name(self, row: int) -> str:
        return named(self.points[row])

    def _untested(self) -> Flags:
        untested_M = np.ones(len(self.points), dtype=bool)
        untested_M[self._measured_rows()] = False
        return untested_M

    def _open(self, chance_M: Array) -> Flags:
        """Not measured, not pending, and not left out since they most likely cannot run."""
        open_M = self._untested() & (chance_M > HOPELESS)
        open_M[self.pending] = False
        return open_M

    def _left_out(self) -> str:
        """What the search has not tried since it most likely cannot run, as the end of a sentence."""
        left_M = self._untested() & (self.chances() <= HOPELESS)
        no_room_M = left_M & unschedulable(self.layout, self.history)
        fails_M = left_M & failing(self.layout, self.values, self.history) & ~no_room_M
        parts = (
            (left_M & ~no_room_M & ~fails_M, "not to fit into memory"),
            (no_room_M, "to find no room on the cluster"),
            (fails_M, "to fail"),
        )
        counted = [f"{int(which_M.sum())} {what}" for which_M, what in parts if which_M.any()]
        return f"; expected of those left out: {', '.join(counted)}" if counted else ""

    def _usual_steps(self) -> float:
        """What a probe of a new point takes, past its warm-up."""
        return float(np.mean([len(observation.steps_s) for _, observation in self._ok()] or [2 * FLOOR_STEPS]))

    def _first(self, group: float | None) -> int | None:
        """The most informative point for its cost, the batches small as long as little is known of memory."""
        chance_M = self.chances()
        open_M = self._open(chance_M)
        if not open_M.any():
            self._why = "no point is left that can run"
            return None
        gain_M = chance_M * information(self.model, self.layout, self.pending)
        if self.memory.capacity_mib == np.inf:  # begin in the lower half
            open_M = open_M & (self.layout.batch_M <= np.median(self.layout.batch_M[open_M]))
        elif self.memory.is_line_unknown():  # no bigger batch is tried before two peaks give the line
            other_M = np.zeros_like(open_M)
            for kind, peaks in self.memory.peaks.items():
                other_M |= (self.kind_M == kind) & ~np.isin(self.layout.batch_M, list(peaks))
            open_M = open_M & other_M if (open_M & other_M).any() else open_M
        step_s_M = times(self.model.mean_P, self.layout).step
        cost_M = self.costs.probe_M(self.layout, step_s_M, chance_M, self._usual_steps(), group)
        row = int(np.argmax(np.where(open_M, gain_M / np.sqrt(cost_M), -1.0)))
        self._why = f"{self._name(row)} tells most about what a step is made of, for its GPU time"
        return row

    def _next(self, group: float | None) -> int | None:
        """The next point to measure, new or known; None: neither is worth it."""
        posterior, chance_M = self.posterior(), self.chances()
        open_M = self._open(chance_M)
        # Of the whole cluster, also where a part of it has gone: what was spent on that part was not spent on the rest.
        grid = self.costs.grid(self.layout, posterior.step_s_M, self.memory.chances(self.kind_M, self.layout.batch_M))
        budget = Budget(grid, self.spent_gpu_s, self.costs.again_gpu_s)
        cost_M = self.costs.probe_M(self.layout, posterior.step_s_M, chance_M, self._usual_steps(), group)
        open_M &= cost_M < budget.left_gpu_s
        row = self._explore(posterior, chance_M, open_M, cost_M, budget)
        if row is not None:
            anchor = self._anchor(posterior, group, budget)
            return row if anchor is None else anchor
        ends = self._why
        row = self._check(posterior, open_M & (chance_M > LIKELY), cost_M, budget)
        if row is None:
            row = self._again(posterior, group, budget)
        if row is None:
            self._why = ends + self._why
        return row

    def _explore(self, posterior: Posterior, chance_M: Array, open_M: Flags, cost_M: Array, budget: Budget) -> int | None:
        """A point that was not measured yet, and is worth it."""
        if not open_M.any():
            if self._open(chance_M).any():
                self._why = "the search has cost as much as measuring every point briefly"
            elif self._untested().any():
                self._why = "every point that is expected to run was measured"
            else:
                self._why = "every point was measured"
            return None
        gain_M, beats_M = chance_M * posterior.gain_M(), chance_M * posterior.beats_M(self.tolerance)
        starts, share_M = self.costs.starts(self.layout), cost_M / budget.grid_gpu_s
        free_M = budget.within(FREE_SHARE, cost_M, starts)
        worth_M = open_M & ((free_M & (beats_M > DOUBT)) | (gain_M > np.where(free_M, PRICE, DEAR) * share_M))
        if worth_M.any():
            row = int(np.argmax(np.where(worth_M, gain_M / cost_M, -1.0)))
            incumbent = self._name(posterior.incumbent_M[row])
            self._why = (
                f"{self._name(row)} is expected to gain {gain_M[row]:.1%} on {incumbent}, and beats it by "
                f"more than {self.tolerance:.0%} with a probability of {beats_M[row]:.0%}"
            )
            return row
        check_M = budget.within(CHECK_SHARE, cost_M, starts)
        if checks := self._neighbours(posterior, posterior.incumbent_M.tolist(), open_M, check_M):
            return self._named_check(posterior, min(checks, key=lambda row: float(cost_M[row])))
        chance = float(np.max(beats_M[open_M]))
        best = "those of the front of speed and cost" if self.along_front else self._name(posterior.best)
        ends = "no untested point is expected to be" if chance <= DOUBT else "no probe is worth its GPU time any more to find one"
        self._why = (
            f"{ends} more than {self.tolerance:.0%} better than {best}; the likeliest is so with a probability of {chance:.1%}"
        )
        return None

    def _check(self, posterior: Posterior, open_M: Flags, cost_M: Array, budget: Budget) -> int | None:
        """A value of an axis that was not measured with the best point's number of workers, though it is expected to be worse."""
        checks = self._neighbours(posterior, [posterior.best], open_M, budget.is_open_to_checks(cost_M), FARTHER)
        return self._named_check(posterior, min(checks, key=lambda row: float(posterior.value_M[row]))) if checks else None

    def _named_check(self, posterior: Posterior, row: int) -> int:
        incumbent = self._name(posterior.incumbent_M[row])
        self._why = f"{self._name(row)} is checked as a neighbour of {incumbent}, which the model expects to be better"
        return row

    def _neighbours(
        self, posterior: Posterior, bests: Sequence[int], open_M: Flags, affordable_M: Flags, farther: float = 0.0
    ) -> list[int]:
        tried_M = ~self._untested()
        tried_M[self.pending] = True
        rows: list[int] = []
        for best in dict.fromkeys(bests):
            rows += unchecked(self.layout, self.global_M, posterior, best, open_M, tried_M, farther)
        return [row for row in rows if affordable_M[row]]

    def _anchor(self, posterior: Posterior, group: float | None, budget: Budget) -> int | None:
        """A point that is known, to measure again since none was for a while.

        One that may have been slow for its time, else the best one that needs no new workers.
        """
        rows, explored = self._measured_rows(), self._why
        since = next((back for back in range(len(rows)) if rows[-1 - back] in rows[: len(rows) - 1 - back]), len(rows))
        if since < ANCHOR_EVERY or self.pending:
            return None
        if (row := self._second_look(posterior, group, budget)) is not None:
            return row
        self._why = explored
        here = [row for row in posterior.leaders(len(rows)).tolist() if self.layout.workers_M[row] == group]
        if not here or rows[-1] == here[0]:
            return None
        self._why = f"{self._name(here[0])} is measured again: is the cluster still what it was?"
        return int(here[0])

    def _repeat_costs(self, posterior: Posterior, group: float | None) -> Array:
        """Of measuring each point once more."""
        steps = min(2 * self._usual_steps(), self.max_steps)
        return self.costs.probe_M(self.layout, posterior.step_s_M, np.ones(len(self.points)), steps, group)

    def _clean(self, posterior: Posterior) -> list[tuple[int, int]]:
        """Point and turn of the measurements that nobody disturbed."""
        ended = [(row, turn) for turn, (row, observation) in enumerate(self.history) if observation.status == "ok"]
        return [pair for pair, is_clean in zip(ended, posterior.disturbances.clean_O, strict=False) if is_clean]

    def _is_futile(self, row: int, clean: Sequence[tuple[int, int]]) -> bool:
        """Whether a point was just measured twice while others disturbed it: they will be there the next time too."""
        last = [*enumerate(self.history)][-2:]
        return all(measured == row and (row, turn) not in clean for turn, (measured, _) in last)

    def _second_look(self, posterior: Posterior, group: float | None, budget: Budget) -> int | None:
        """A point that may only look slow for the time at which it was measured."""
        rows, cost_M, clean = self._measured_rows(), self._repeat_costs(posterior, group), self._clean(posterior)
        turns = [[turn for row, turn in clean if row == point] for point in posterior.rows_U]
        workers_U, batch_U = self.layout.workers_M[posterior.rows_U], self.layout.batch_M[posterior.rows_U]
        ended_s = np.array([self.costs.ended_s[turn] for turn, (_, one) in enumerate(self.history) if one.status == "ok"])
        shares_U = posterior.disturbances.shares(self.layout.workers_M[rows], workers_U, ended_s)
        groups_U = [*zip(workers_U.tolist(), self.kind_M[posterior.rows_U].tolist(), strict=True)]
        for index, gain in second_look(groups_U, batch_U, posterior.cost_U, turns, shares_U, self.costs.ended_s):
            row = int(posterior.rows_U[index])
            worth = gain > SECOND_LOOK_PRICE * budget.price(cost_M[row]) and rows.count(row) < MOST_LOOKS / 2
            if row not in self.pending and worth and cost_M[row] < budget.left_repeats_gpu_s:
                self._why = f"{self._name(row)} is measured again: it may have been slow for the time at which it was measured"
                return row
        return None

    def _again(self, posterior: Posterior, group: float | None, budget: Budget) -> int | None:
        """One of the leading points, to measure again before the best of them is named."""
        if (row := self._second_look(posterior, group, budget)) is not None:
            return row
        cost_M, clean, rows = self._repeat_costs(posterior, group), self._clean(posterior), self._measured_rows()
        contest = Contest.of(posterior, rows, [row for row, _ in clean], (self.seed, len(self.history)))
        verified = contest.clean[int(contest.rows_C[0])] > 1
        for row in [] if contest.is_settled else contest.candidates():
            worth = not verified or contest.loss > CONTEST_PRICE * budget.price(cost_M[row])
            if row not in self.pending and worth and cost_M[row] < budget.left_repeats_gpu_s and not self._is_futile(row, clean):
                self._why = f"{self._name(row)} is measured again: of the leading points it may be the best"
                return row
        self._why = contest.summary() if not self.along_front else ""
        return None
