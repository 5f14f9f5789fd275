"""What probes cost, what a search may still cost, and how much a probe has to bring for its cost.

All in GPU-seconds, from the durations of the probes so far; the unit is a lean grid, which measures every point once and briefly.
A search that has cost little so far spends more easily on its doubts.

Shapes: M points.
"""

from dataclasses import dataclass, field

import numpy as np

from service.search.points import Array, Flags, Layout, Observation

GRID_STEPS = 40  # steps past the warm-up that a lean grid measures of each point
OOM_S = 5.0  # until a batch that does not fit says so
MAX_SHARE = 0.6  # of a lean grid that is spent at most; the rest is what its estimate may be off by
CONFIRM_SHARE = 0.06  # of that, in lean grids, that is kept for measuring the leading points again at the end
MAX_REPEATS_SHARE = 0.2  # of a lean grid beyond which no known point is measured again before that
LEAST_SHARE = 0.08  # of a lean grid: a search that has cost less goes on as long as a probe may show something
EARLY_PRICE = 0.3  # of a probe, before the least share is spent


@dataclass
class ProbeCosts:
    """A probe is the start of its workers, where they are not there yet, its setup (data, models), its warm-up and its steps."""

    warmup_steps: int
    max_steps: int
    usual_start_s: float
    spent_gpu_s: float = 0.0
    again_gpu_s: float = 0.0  # of that, on points that were measured before
    starts_s: list[float] = field(default_factory=list)
    setups_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)  # when each probe ended, as if they had run one after the other

    @property
    def start_s(self) -> float:
        """Seconds that a new group of workers takes to start."""
        return float(np.median(self.starts_s)) if self.starts_s else self.usual_start_s

    @property
    def setup_s(self) -> float:
        """Seconds of a probe before its first step, with workers that are there."""
        return float(np.median(self.setups_s)) if self.setups_s else 0.0

    def add(self, workers: float, observation: Observation, same_group: bool, again: bool) -> None:
        """Take up what a probe took; where it does not say, what such a probe usually takes."""
        began_s = self.ended_s[-1] if self.ended_s else 0.0
        if observation.status == "infeasible":
            self.ended_s.append(began_s)
            return
        if observation.start_s:
            self.starts_s.append(observation.start_s)
        start_s = observation.start_s if observation.start_s is not None else 0.0 if same_group else self.start_s
        steps_s = float(np.sum(observation.steps_s))
        warmup_s = self.warmup_steps * steps_s / len(observation.steps_s) if len(observation.steps_s) else 0.0
        if observation.seconds is not None and observation.status == "ok":
            self.setups_s.append(max(observation.seconds - start_s - warmup_s - steps_s, 0.0))
        rest_s = warmup_s + steps_s if observation.status == "ok" else OOM_S
        seconds = observation.seconds if observation.seconds is not None else start_s + self.setup_s + rest_s
        gpu_s = workers * seconds
        self.ended_s.append(began_s + seconds)
        self.spent_gpu_s += gpu_s
        self.again_gpu_s += gpu_s if again else 0.0

    def probe_gpu_s_M(self, layout: Layout, step_s_M: Array, chance_M: Array, steps: float, group: float | None) -> Array:
        """Of a probe of so many steps at each point, which runs with the given chance and otherwise ends its group of workers."""
        start_M = np.where(layout.workers_M == group, 0.0, self.start_s)
        ran_M = self.setup_s + (self.warmup_steps + steps) * step_s_M
        return np.asarray(
            layout.workers_M * (start_M + chance_M * ran_M + (1 - chance_M) * (self.setup_s + OOM_S + self.start_s))
        )

    def starts_gpu_s(self, layout: Layout) -> float:
        """Of one start for each number of workers."""
        return float(np.unique(layout.workers_M).sum()) * self.start_s

    def grid_gpu_s(self, layout: Layout, step_s_M: Array, chance_M: Array) -> float:
        """Of measuring every point once and briefly, those with as many workers one after the other on one start."""
        steps = self.warmup_steps + min(GRID_STEPS, self.max_steps)
        return self.starts_gpu_s(layout) + float((chance_M * layout.workers_M * (self.setup_s + steps * step_s_M)).sum())


@dataclass(frozen=True)
class Budget:
    """Of a search at one time."""

    grid_gpu_s: float
    spent_gpu_s: float
    repeats_gpu_s: float  # of that, on points that were measured before

    @property
    def left_confirm_gpu_s(self) -> float:
        """For measuring a leading point again at the end."""
        return MAX_SHARE * self.grid_gpu_s - self.spent_gpu_s

    @property
    def left_gpu_s(self) -> float:
        """For any probe before."""
        return self.left_confirm_gpu_s - CONFIRM_SHARE * self.grid_gpu_s

    @property
    def left_repeats_gpu_s(self) -> float:
        """For one of a point that was measured before."""
        return min(self.left_gpu_s, MAX_REPEATS_SHARE * self.grid_gpu_s - self.repeats_gpu_s)

    def within(self, share: float, cost_M: Array, more_gpu_s: float = 0.0) -> Flags:
        """Which probes leave the search's cost below a share of a lean grid, and so much more."""
        return np.asarray(self.spent_gpu_s + cost_M < share * self.grid_gpu_s + more_gpu_s)

    def price(self, cost: float) -> float:
        """A probe's cost in lean grids, as much as it counts."""
        counts = EARLY_PRICE if self.within(LEAST_SHARE, np.array(cost)) else 1.0
        return counts * cost / self.grid_gpu_s
