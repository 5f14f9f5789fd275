"""The kinds of probes that a search may go on with, and which of them is worth its GPU time now.

Shapes: M points, U points that were measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.search.budget import LEAST_SHARE, Budget
from service.search.confirmation import MAX_FAILED, MAX_REPEATS, BestPointConfirmation
from service.search.formulas import step_times
from service.search.neighbours import unchecked_neighbours
from service.search.points import Array, Flags, describe_point
from service.search.state import SearchState
from service.search.suspects import MeasuredPoint, suspects

MIN_WIN_PROBABILITY = 0.05  # of beating the best point by more than the tolerance: below it a point is not worth a probe
GAIN_PER_GRID, LATE_GAIN_PER_GRID = 0.1, 0.6  # relative gain that a probe as dear as a lean grid would have to bring
EARLY_SHARE = 0.10  # of a lean grid, its starts added: until it is spent the lower gain will do, or the probability
NEIGHBOUR_SHARE = 0.15  # the same for neighbours of the best point
CHEAP_CHECK_MARGIN = 0.35  # while the search is cheap, values are checked that are expected to be worse by this (log of the cost)
MIN_CHECK_CHANCE = 0.9  # to run, of what is checked only in case the model is wrong
CONFIRM_LOSS_PER_GRID = 1.5  # expected loss of taking the leader for the best, for a repeat as dear as a lean grid
SUSPECT_GAIN_PER_GRID = 0.5  # expected gain of measuring a suspect again, as dear as a lean grid
REPEAT_INTERVAL = 8  # probes after which a known point is measured again


@dataclass(frozen=True)
class Proposal:
    """The row of a point to measure, or None, and why, in a sentence."""

    row: int | None
    why: str


def first_probe(state: SearchState, group: float | None) -> Proposal:
    """The most informative point for its cost, the batches small as long as little is known of memory."""
    layout, memory, chance_M = state.layout, state.memory, state.chances()
    open_M = state.candidates_M(chance_M)
    if not open_M.any():
        return Proposal(None, "no point is left that can run")
    gain_M = chance_M * state.model.information(layout, state.pending)
    if memory.capacity_mib == np.inf:  # begin in the lower half
        open_M = open_M & (layout.batch_M <= np.median(layout.batch_M[open_M]))
    elif memory.is_line_unknown():  # no bigger batch is tried before two peaks give the line
        other_M = np.zeros_like(open_M)
        for kind, peaks in memory.peaks.items():
            other_M |= (state.kind_M == kind) & ~np.isin(layout.batch_M, list(peaks))
        open_M = open_M & other_M if (open_M & other_M).any() else open_M
    step_s_M = step_times(state.model.mean_P, layout).step
    cost_M = state.costs.probe_gpu_s_M(layout, step_s_M, chance_M, state.usual_steps, group)
    row = int(np.argmax(np.where(open_M, gain_M / np.sqrt(cost_M), -1.0)))
    return Proposal(row, f"{describe_point(state.points[row])} tells most about what a step is made of, for its GPU time")


class Proposals:
    """What may be measured next once a point ran. `group` is the num_workers of the workers that are there, if any."""

    def __init__(self, state: SearchState, group: float | None) -> None:
        self.state, self.group = state, group
        self.posterior, self.chance_M = state.posterior(), state.chances()
        layout, step_s_M = state.layout, self.posterior.step_s_M
        # Of the whole cluster, also where a part of it has gone: what was spent on that part was not spent on the rest.
        grid_gpu_s = state.costs.grid_gpu_s(layout, step_s_M, state.memory.chances(state.kind_M, layout.batch_M))
        self.budget = Budget(grid_gpu_s, state.costs.spent_gpu_s, state.costs.again_gpu_s)
        self.cost_M = state.costs.probe_gpu_s_M(layout, step_s_M, self.chance_M, state.usual_steps, group)
        self.open_M = state.candidates_M(self.chance_M) & (self.cost_M < self.budget.left_gpu_s)

    def next(self) -> Proposal:
        """The point to measure next, new or known; None: neither is worth it."""
        explored = self.explore()
        if explored.row is not None:
            return self.remeasure_suspect_meanwhile() or explored
        if not self.state.has_runnable:
            return Proposal(None, f"{explored.why}; no measured point can run on the nodes that are left")
        if found := self.check() or self.remeasure_suspect():
            return found
        confirmed = self.confirm_best()
        return confirmed if confirmed.row is not None else Proposal(None, explored.why + confirmed.why)

    def explore(self) -> Proposal:
        """A point that was not measured yet, and is worth it."""
        state, posterior, open_M = self.state, self.posterior, self.open_M
        if not open_M.any():
            if state.candidates_M(self.chance_M).any():
                return Proposal(None, "the search has cost as much as measuring every point briefly")
            every = "every point that is expected to run" if state.untested_M.any() else "every point"
            return Proposal(None, f"{every} was measured")
        gain_M, beats_M = self.chance_M * posterior.gain_M(), self.chance_M * posterior.beats_M(state.tolerance)
        starts_gpu_s, share_M = state.costs.starts_gpu_s(state.layout), self.cost_M / self.budget.grid_gpu_s
        early_M = self.budget.within(EARLY_SHARE, self.cost_M, starts_gpu_s)
        needed_M = np.where(early_M, GAIN_PER_GRID, LATE_GAIN_PER_GRID) * share_M
        worth_M = open_M & ((early_M & (beats_M > MIN_WIN_PROBABILITY)) | (gain_M > needed_M))
        if worth_M.any():
            row = int(np.argmax(np.where(worth_M, gain_M / self.cost_M, -1.0)))
            return Proposal(
                row,
                f"{self._name(row)} is expected to gain {gain_M[row]:.1%} on {self._name(posterior.incumbent_M[row])}, and beats "
                f"it by more than {state.tolerance:.0%} with a probability of {beats_M[row]:.0%}",
            )
        affordable_M = self.budget.within(NEIGHBOUR_SHARE, self.cost_M, starts_gpu_s)
        if rows := self._neighbours(posterior.incumbent_M.tolist(), open_M, affordable_M):
            return self._neighbour(min(rows, key=lambda row: float(self.cost_M[row])))
        chance = float(np.max(beats_M[open_M]))
        best = "those of the front of speed and cost" if state.along_front else self._name(posterior.best)
        hopeless = chance <= MIN_WIN_PROBABILITY
        ends = "no untested point is expected to be" if hopeless else "no probe is worth its GPU time any more to find one"
        return Proposal(
            None,
            f"{ends} more than {state.tolerance:.0%} better than {best}; the likeliest is so with a probability of {chance:.1%}",
        )

    def check(self) -> Proposal | None:
        """A value of an axis that was not measured with the best point's number of workers, though it is expected to be worse."""
        open_M = self.open_M & (self.chance_M > MIN_CHECK_CHANCE)
        affordable_M = self.budget.within(LEAST_SHARE, self.cost_M)
        rows = self._neighbours([self.posterior.best], open_M, affordable_M, CHEAP_CHECK_MARGIN)
        return self._neighbour(min(rows, key=lambda row: float(self.posterior.value_M[row]))) if rows else None

    def remeasure_suspect_meanwhile(self) -> Proposal | None:
        """A suspect before all is explored, where no known point was measured again for a while."""
        rows = self.state.measured_rows
        since = next((back for back in range(len(rows)) if rows[-1 - back] in rows[: len(rows) - 1 - back]), len(rows))
        return None if since < REPEAT_INTERVAL or self.state.pending else self.remeasure_suspect()

    def remeasure_suspect(self) -> Proposal | None:
        """A point that may only look slow for the time at which it was measured."""
        rows = self.state.measured_rows
        for index, gain in suspects(self._measured_points(), self.state.costs.ended_s):
            row = int(self.posterior.rows_U[index])
            worth = gain > SUSPECT_GAIN_PER_GRID * self.budget.price(self.repeat_cost_M[row])
            if worth and rows.count(row) < MAX_REPEATS / 2 and self._may_repeat(row, self.budget.left_repeats_gpu_s):
                return Proposal(
                    row, f"{self._name(row)} is measured again: it may have been slow for the time at which it was measured"
                )
        return None

    def _measured_points(self) -> list[MeasuredPoint]:
        """In the order of the posterior's."""
        state, posterior, layout = self.state, self.posterior, self.state.layout
        rows, turns = state.measured_rows, state.turns
        workers_U = layout.workers_M[posterior.rows_U]
        ended_O = np.array(state.costs.ended_s)[turns]
        shares_U = posterior.disturbances.shares(layout.workers_M[rows], workers_U, ended_O)
        return [
            MeasuredPoint(
                group=(float(layout.workers_M[point]), int(state.kind_M[point])),
                batch=float(layout.batch_M[point]),
                cost=float(cost),
                turns=[turn for row, turn in self.clean if row == point],
                last_turn=max(turn for row, turn in zip(rows, turns, strict=True) if row == point),
                disturbed_share=float(share),
            )
            for point, cost, share in zip(posterior.rows_U.tolist(), posterior.cost_U, shares_U, strict=True)
        ]

    def confirm_best(self) -> Proposal:
        """One of the leading points, to measure again before the best of them is named; None: it is clear enough which it is."""
        state, clean = self.state, self.clean
        seed = (state.seed, len(state.history))
        leaders = BestPointConfirmation.of(self.posterior, state.measured_rows, [row for row, _ in clean], seed)
        for row in [] if leaders.is_settled else leaders.candidates():
            worth = bool(leaders.unverified) or leaders.loss > CONFIRM_LOSS_PER_GRID * self.budget.price(self.repeat_cost_M[row])
            if worth and self._may_repeat(row, self.budget.left_confirm_gpu_s) and not self._is_futile(row):
                return Proposal(row, f"{self._name(row)} is measured again: of the leading points it may be the best")
        return Proposal(None, leaders.summary() if not state.along_front else "")

    @cached_property
    def repeat_cost_M(self) -> Array:
        """GPU-seconds of measuring each point once more."""
        steps = min(2 * self.state.usual_steps, self.state.max_steps)
        always_M = np.ones(len(self.state.points))
        return self.state.costs.probe_gpu_s_M(self.state.layout, self.posterior.step_s_M, always_M, steps, self.group)

    @cached_property
    def clean(self) -> list[tuple[int, int]]:
        """Row and turn of the measurements that nobody disturbed."""
        ended = zip(self.state.measured_rows, self.state.turns, self.posterior.disturbances.clean_O, strict=False)
        return [(row, turn) for row, turn, is_clean in ended if is_clean]

    def _may_repeat(self, row: int, left_gpu_s: float) -> bool:
        num_failed = sum(tried == row and observation.status != "ok" for tried, observation in self.state.history)
        return row not in self.state.pending and num_failed < MAX_FAILED and bool(self.repeat_cost_M[row] < left_gpu_s)

    def _is_futile(self, row: int) -> bool:
        """Whether a point was just measured twice while others disturbed it: they will be there the next time too."""
        last = [*enumerate(self.state.history)][-2:]
        return all(measured == row and (row, turn) not in self.clean for turn, (measured, _) in last)

    def _neighbours(self, bests: Sequence[int], open_M: Flags, affordable_M: Flags, margin: float = 0.0) -> list[int]:
        state, tried_M = self.state, ~self.state.untested_M
        tried_M[state.pending] = True
        rows: list[int] = []
        for best in dict.fromkeys(bests):
            rows += unchecked_neighbours(state.layout, state.global_M, self.posterior, best, open_M, tried_M, margin)
        return [row for row in rows if affordable_M[row]]

    def _neighbour(self, row: int) -> Proposal:
        incumbent = self._name(self.posterior.incumbent_M[row])
        return Proposal(row, f"{self._name(row)} is checked as a neighbour of {incumbent}, which the model expects to be better")

    def _name(self, row: int) -> str:
        return describe_point(self.state.points[row])
