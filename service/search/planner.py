"""Which point of a sweep to probe next, so that the best one is found for little GPU time.

A few probes where the step-time model learns most; then those with the best expected gain a GPU-second; then the best point's
neighbours, in case the model is wrong about them; then the leading points again, in turn, until it is clear enough which one is
the best. Now and then a known point is measured again that may have been slow for its time. Nothing here knows who runs a probe.

Shapes: M points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.search.disturbance import excess
from service.search.pareto_front import behind, front
from service.search.points import Observation, Point, identity
from service.search.proposals import MIN_WIN_PROBABILITY, Proposal, Proposals, first_probe
from service.search.state import MIN_PROBE_STEPS, SearchState
from service.search.step_time_statistics import MeanStepTime

FIRST_PROBES = 4  # by optimal design, before gains are compared
STOP_ERROR, STOP_ERROR_REPEAT = 0.04, 0.015  # a probe ends when its mean is known so well (relative, 95%); one of a known point
STOP_ERROR_BEHIND, MAX_STOP_ERROR = 0.25, 0.1  # of a point that is 20% behind the best 5% more will do; and at most so much


@dataclass(frozen=True)
class Forecast:
    """Of one point."""

    point: Point
    step_s: float
    sd: float  # of the step, relative
    measured: bool


class Planner:
    """Proposes points (`ask`) and takes up what they brought (`tell`); from the same observations follows the same next point.

    A point may be proposed again, and has as many observations as it was measured.
    """

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self._why = "nothing was measured yet"

    def tell(self, point: Point, observation: Observation) -> None:
        """Take up what a point brought, in any order, proposed or not, once more or for the first time.

        Raises:
            KeyError: the point is none of the sweep's.
        """
        self.state.add(point, observation)

    def ask(self, group: float | None = None) -> Point | None:
        """The next point to probe; None when no further probe is worth it, or none is left.

        `group` is the num_workers of the group that would probe it: a point with as many pays for no start.
        """
        num_ok, proposal = len(self.state.measurements), Proposal(None, self._why)
        if num_ok + len(self.state.pending) < FIRST_PROBES or not self.state.has_runnable:
            proposal = first_probe(self.state, group)
        if proposal.row is None and num_ok:
            proposal = Proposals(self.state, group).next()
        self._why = proposal.why
        if proposal.row is None:
            self._why += self.state.left_out()
            return None
        self.state.pending.append(proposal.row)
        return self.state.points[proposal.row]

    def should_stop(self, steps_s: Sequence[float], point: Point | None = None) -> bool:
        """Whether a probe's mean step time is known well enough, or the probe has had its steps; no point: the one pending.

        That is to 4%, of a point that was measured before to 1.5%; what is far from the best is worth no long probe (Maron and
        Moore 1994, "Hoeffding races").
        """
        count, state = len(steps_s), self.state
        rows = [state.row[identity(point)]] if point is not None else state.pending
        row = rows[0] if len(rows) == 1 else None
        # Loader workers that make a batch each deliver in bursts: a mean needs one from each of them.
        floor = MIN_PROBE_STEPS if row is None else max(MIN_PROBE_STEPS, state.layout.threads_M[row])
        if not floor <= count < state.max_steps:
            return count >= state.max_steps
        mean, known = state.measured.slow.mean(steps_s), STOP_ERROR
        rows = state.measured_rows
        if row is not None and rows:
            least_O = state.measured.logs_3M[0] + state.offset_M[rows]
            if state.along_front:
                least_O += behind(state.layout.workers_M[[row]], state.layout.workers_M[rows])[:, 0]
            late = math.log(mean.step_s) + state.offset_M[row] - float(least_O.min())
            if row in rows and count >= 2 * floor and self._is_disturbed(row, mean):
                return True
            known = STOP_ERROR_REPEAT if row in rows else STOP_ERROR
            known = min(known + STOP_ERROR_BEHIND * max(late, 0.0), MAX_STOP_ERROR)
        return 1.96 * mean.error <= known

    def best(self) -> Point | None:
        """The best measured point, by its own measurements, its neighbours' and the model; None where nothing ran."""
        return self.state.points[self.state.posterior().best] if self.state.measurements else None

    def front(self) -> list[Point]:
        """The measured points that no other one beats in speed and cost, the fewest workers first."""
        state = self.state
        if not state.measurements:
            return []
        posterior = state.posterior()
        workers_U, time_U = state.layout.workers_M[posterior.rows_U], posterior.cost_U - state.cost_M[posterior.rows_U]
        return [state.points[posterior.rows_U[index]] for index in front(workers_U, time_U)]

    def bound(self) -> float:
        """No untested point is expected to run and to be better by more than this share, each with a probability of 95%.

        Better than the best measured one, or with the metric `pareto` than those that keep it off the front. What was left out
        counts with the chance that it can run. Infinite where nothing ran.
        """
        if not self.state.measurements:
            return math.inf
        untested_M = self.state.untested_M
        return self.state.posterior().bound(untested_M, self.state.chances(), MIN_WIN_PROBABILITY) if untested_M.any() else 0.0

    def forecasts(self) -> list[Forecast]:
        """The posterior of every point, in the order of `points`; before anything ran, what a cluster usually is like."""
        state = self.state
        if state.measurements:
            posterior = state.posterior()
            step_s_M, sd_M = posterior.step_s_M, posterior.spread_M
        else:
            guess = state.model.predict(state.points)
            step_s_M, sd_M = guess.step_s, guess.step_sd_s / guess.step_s
        columns = (step_s_M, sd_M, ~state.untested_M)
        return [Forecast(*row) for row in zip(state.points, *(column.tolist() for column in columns), strict=True)]

    def why(self) -> str:
        """Why the last answer of `ask` was given, in a sentence."""
        return self._why

    def _is_disturbed(self, row: int, mean: MeanStepTime) -> bool:
        """Whether a point is so much slower than it was before that more steps would say no more of it."""
        before = [at for at, earlier in enumerate(self.state.measured_rows) if earlier == row]
        logs_R = np.append(self.state.measured.logs_3M[0, before], math.log(mean.step_s))
        return bool(excess(logs_R, np.append(self.state.measured.noise_M[before], mean.error))[-1] > 0)
