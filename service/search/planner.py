"""Which point of a sweep to probe next, so that the best one is found for little GPU time.

The posterior over all points is a set of joint draws: the physical model with parameters as the measurements leave them
possible, plus a smooth error of that model. A point's chance to be better, the expected gain of a probe and the bound on what is
left are counts and means over these draws. Nothing here knows who runs a probe.

Shapes: M points, U those that were measured, S draws.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from service.config.space import GLOBAL_BATCH
from service.runs.result import ClusterHardware
from service.search.points import (
    Array,
    Flags,
    Observation,
    Point,
    categories,
    describe_point,
    identity,
    relative_error,
)
from service.search.step_time import Measured, StepTime, step_times

Rows = NDArray[np.int_]
METRICS = {"images_per_s": 0, "epoch_s": 0, "gpu_s_per_epoch": 1, "pareto": 0}  # power of num_workers in what one image costs
DRAWS = 256
DOUBT = 0.1  # probability of a better point at which a search ends; the bound is the interval of 1 - DOUBT
BUDGET_GRID_SHARE = 0.35  # of a lean grid, where the user sets no budget
SMALL_GRID_SHARE, SMALL_GRID_POINTS = 0.6, 50  # of a grid of up to so many points, where starts cost more than probes
RESERVE = 0.15  # of the budget, for measuring the leading points again
GRID_STEPS = 40  # steps past the warm-up that a lean grid measures of each point
OOM_S = 5.0  # until a batch that does not fit says so
MIN_STEPS, STOP_ERROR = 8, 0.05  # a probe ends once its mean is known so well (95%)
BEHIND_ERROR = 0.25  # of how far a point is behind the best one: so well is enough
PREFETCH = 2  # batches that a loader worker has ready
LOADING = 0.25  # share of the step that loading takes, from which on it matters what was ready
FORM_SD, FORM_WEIGHT = 0.1, 4.0  # of the model's own error: before anything is measured, and how many points that counts for
OCTAVES = np.array([[1.5], [1.5], [1.0]])  # of workers, batch, loader workers: how far the model's error stays the same
SMOOTH, OF_BATCH, OWN = 0.65, 0.25, 0.1  # shares of its variance: smooth, of one batch a worker, of a point alone
REPEAT_SD = 0.01  # relative difference of two measurements of one point that their steps do not show
CHECK_LOSS = 0.4  # the model is checked at points that are expected to lose so much, in logarithms
CHECK_SHARE = 0.1  # for up to this share of a lean grid
LEADERS, NUM_REPEATED = 5, 3  # measured points that may lead, and those of them that are measured at least twice
MAX_REPEATS = 4  # measurements of one point
LEADER_CHANCE = 0.03  # a leader is better than the best by more than the tolerance so likely
USABLE_MEMORY = 0.985  # of a GPU's: what a batch may take
OTHER_KIND = 0.4  # chance of a batch to fit that ran out of memory with another value of an extra key
SLOWED = 1.25  # a measurement so far from the point's median is another load's
MAX_FAILED_OF_VALUE = 3  # points that failed, none that ran: all others with that value are out
RAN_OUT_OF_MEMORY, HAS_NO_ROOM = 1e2, 1e3  # handicaps of measured points: the best is none of these while there is another


@dataclass(frozen=True)
class Posterior:
    """What the measurements say of every point. Costs are logarithms of seconds of an image, or of GPU-seconds."""

    form_sd: float
    step_SM: Array  # joint draws of the logarithm of the seconds of a step
    step_s_M: Array
    cost_SM: Array
    cost_M: Array
    ahead_SM: Array  # how much better each point is than its incumbent, in the draws in which it can run
    loading_M: Array  # what loading takes, over everything else
    leading_U: Rows  # measured points, the best one first
    incumbent_M: Rows  # the measured point that each one has to beat
    to_beat_M: Array  # and its cost; on a front that of workers which there are more or fewer of

    @property
    def best(self) -> int:
        """Return the best measured point; among equals within the tolerance, one whose peak leaves memory to spare."""
        return int(self.leading_U[0])


class Planner:
    """Proposes points (`ask`) and takes up what they brought (`tell`); from the same observations follows the same next point.

    A point may be proposed again, and has as many observations as it was measured.
    """

    def __init__(
        self,
        points: Sequence[Point],
        hardware: ClusterHardware,
        *,
        metric: str = "images_per_s",
        tolerance: float = 0.025,
        budget_grid_share: float | None = None,
        budget_gpu_s: float | None = None,
        seed: int = 0,
        max_steps: int = 60,
        warmup_steps: int = 5,
        start_s: float = 25.0,
        factor: Callable[[Point], float] = lambda point: 1.0,
    ) -> None:
        """`max_steps` bounds one probe, `warmup_steps` are those that it runs before; `start_s` is what a new group of workers
        takes before its first step, until one is known. The budget is in GPU-seconds or a share of a lean grid, which measures
        every point once and briefly.

        `factor` is what a point's seconds for an image are multiplied by, such as the images that a batch needs to a target.
        The metric `pareto` asks for the front of speed and cost: the best of each num_workers that none beats in both.

        Raises KeyError: a point without scale.num_workers, data.global_batch_size or data.loader_workers.
        """
        self.tolerance, self.max_steps, self._warmup_steps, self._usual_start_s = tolerance, max_steps, warmup_steps, start_s
        self._along_front, self._grid_share, self._budget_gpu_s = metric == "pareto", budget_grid_share, budget_gpu_s
        self.points = list({identity(point): point for point in points}.values())
        self.row = {identity(point): row for row, point in enumerate(self.points)}
        self._prior = StepTime.prior(hardware, categories(self.points))
        self.layout = layout = self._prior.layout(self.points)
        global_M = np.array([float(point[GLOBAL_BATCH]) for point in self.points])
        factor_M = np.array([factor(point) for point in self.points])
        self._offset_M = METRICS[metric] * np.log(layout.workers_M) - np.log(global_M) + np.log(factor_M)
        self._kind_M = np.unique(layout.member_KM.T, axis=0, return_inverse=True)[1].reshape(-1)
        self.history: list[tuple[int, Observation]] = []
        self.pending: list[int] = []
        self._why = "nothing was measured yet"
        self._posterior: tuple[int, Posterior] | None = None
        rng = np.random.default_rng(seed)
        self._seed, self._luck_S1 = seed, rng.random((DRAWS, 1))
        self._similar_MM = self._similarity()
        root_MM = np.linalg.cholesky(self._similar_MM + 1e-8 * np.eye(len(self.points)))
        self._error_SM = rng.standard_normal((DRAWS, len(self.points))) @ root_MM.T

    def _similarity(self) -> Array:
        """Correlation of the model's errors: Matérn 3/2 in octaves of each axis, less across categories; one batch; one point."""
        layout = self.layout
        axes = np.log2(np.stack([layout.workers_M, layout.batch_M, layout.threads_M + 1])) / OCTAVES
        square_MM = ((axes[:, :, None] - axes[:, None]) ** 2).sum(axis=0)
        square_MM += 0.5 * (layout.member_KM[:, :, None] != layout.member_KM[:, None]).sum(axis=0)
        distance_MM = np.sqrt(3 * square_MM)
        smooth_MM = (1 + distance_MM) * np.exp(-distance_MM)
        return np.asarray(
            SMOOTH * smooth_MM + OF_BATCH * np.equal.outer(layout.batch_M, layout.batch_M) + OWN * np.eye(len(axes[0]))
        )

    # What was measured

    def tell(self, point: Point, observation: Observation) -> None:
        """Take up what a point brought, in any order, proposed or not, once more or for the first time.

        Raises:
            KeyError: the point is none of the sweep's.
        """
        row = self.row[identity(point)]
        if row in self.pending:
            self.pending.remove(row)
        if observation.status == "ok" and not len(observation.steps_s):
            observation = replace(observation, status="failed")
        self.history.append((row, observation))

    @property
    def measured_rows(self) -> list[int]:
        """Rows of the points that ran, each once."""
        return list(dict.fromkeys(self._ended("ok")))

    def _ended(self, *statuses: str) -> list[int]:
        return [row for row, one in self.history if one.status in statuses]

    def _joined(self, row: int) -> tuple[Observation, float]:
        """A point's measurements as one, and the relative error that their steps do not show.

        Short ones do not count where there are longer ones, nor those far from the median: another job came or went.
        """
        found = [one for at, one in self.history if (at, one.status) == (row, "ok")]
        longest = max(len(one.steps_s) for one in found)
        found = [replace(one, steps_s=self._settled(row, one.steps_s)) for one in found if 2 * len(one.steps_s) >= longest]
        means_U = np.array([np.mean(one.steps_s) for one in found])
        alone_U = np.abs(np.log(means_U / np.median(means_U))) <= math.log(SLOWED)
        alone_U |= ~alone_U.any()  # two that differ by more are both as likely
        alone = [one for one, is_alone in zip(found, alone_U, strict=True) if is_alone]
        spread = max(REPEAT_SD, np.log(means_U[alone_U]).std(ddof=1) if len(alone) > 1 else 0.0)
        phases_s = {name: float(np.mean([one.phases_s.get(name, 0.0) for one in alone])) for name in alone[0].phases_s}
        steps_s = [step_s for one in alone for step_s in one.steps_s]
        return Observation("ok", steps_s, phases_s), spread / math.sqrt(len(alone))

    def _settled(self, row: int, steps_s: Sequence[float]) -> Sequence[float]:
        """Without the steps that lived on batches loaded before the probe, where these were faster."""
        ready = PREFETCH * int(self.layout.threads_M[row])
        if 0 < ready <= len(steps_s) - MIN_STEPS and np.mean(steps_s[ready:]) > 1.05 * np.mean(steps_s[:ready]):
            return steps_s[ready:]
        return steps_s

    # What can run

    def chances(self) -> Array:
        """The probability that each point can run, in the order of `points`; 0: it is left out."""
        chance_M, lost_M, failed = self._chance_to_fit(), self._without_room_M(), self._ended("failed")
        for row in failed:
            chance_M[row] *= 0.7 if failed.count(row) == 1 else 0.0
        chance_M[self._broken_M()] = 0.0
        chance_M[[row for row in self.measured_rows if row not in self._ended("oom")]] = 1.0
        return np.where(lost_M, 0.0, chance_M)

    def _chance_to_fit(self) -> Array:
        """No batch a GPU as large as one of its kind that ran out of memory; less likely the further beyond the largest that ran.

        A peak is a fixed part and one that grows with the batch; until two batches ran, their shares are unknown.
        """
        batch_M, chance_M = self.layout.batch_M, np.ones(len(self.points))
        refused_anywhere = min(batch_M[self._ended("oom")], default=math.inf)
        for kind in np.unique(self._kind_M):
            is_kind_M = self._kind_M == kind
            ended = [(batch_M[row], one.status, one.room) for row, one in self.history if is_kind_M[row]]
            refused = min((batch for batch, status, _ in ended if status == "oom"), default=math.inf)
            ran = [(batch, room) for batch, status, room in ended if status == "ok"]
            if not ran:
                chance_M[is_kind_M & (batch_M >= refused_anywhere)] = OTHER_KIND
            elif (peak := 1 / max(ran)[1]) > 0:
                smallest, largest = min(ran), max(ran)
                growth, power = peak, 1  # of the peak, were the batch twice as large: at most
                if smallest[0] < largest[0]:
                    growth, power = max((peak - 1 / smallest[1]) / (1 - smallest[0] / largest[0]), 1e-3), 6
                spare = max((USABLE_MEMORY - peak) / growth, 0.01)
                chance_M[is_kind_M] = (spare / np.maximum(batch_M[is_kind_M] / largest[0] - 1, spare)) ** power
            chance_M[is_kind_M & (batch_M >= refused)] = 0.0
        return chance_M

    def _broken_M(self) -> Flags:
        """Points with a value, or with at least as many workers, of which several failed and none ran."""
        failed, ran = self._ended("failed"), self._ended("ok", "oom")
        members_KM, workers_M = self.layout.member_KM > 0, self.layout.workers_M
        having_VM = np.concatenate([members_KM, ~members_KM, workers_M >= np.unique(workers_M)[:, None]])
        count_V = having_VM[:, failed].sum(axis=1)
        return np.asarray(having_VM[(count_V >= MAX_FAILED_OF_VALUE) & ~having_VM[:, ran].any(axis=1)].any(axis=0))

    def _without_room_M(self) -> Flags:
        """Points that need at least as many workers and loader workers as one that had no room, unless one of them ran later.

        Where two had none, those with as many workers as both of them are out, whatever their loader workers.
        """
        workers_M, threads_M = self.layout.workers_M, self.layout.threads_M
        without_M, counts = np.zeros(len(self.points), dtype=bool), list[float]()
        for turn, (row, one) in enumerate(self.history):
            if one.status == "infeasible":
                as_much_M = (workers_M >= workers_M[row]) & (threads_M >= threads_M[row])
                if not as_much_M[[later for later, other in self.history[turn:] if other.status in ("ok", "oom")]].any():
                    without_M |= as_much_M
                    counts.append(float(workers_M[row]))
        return without_M | (workers_M >= sorted(counts)[1]) if len(counts) > 1 else without_M

    # What it costs, in GPU-seconds

    @property
    def start_s(self) -> float:
        """Seconds that a new group of workers takes to start."""
        starts_s = [one.start_s for _, one in self.history if one.start_s]
        return float(np.median(starts_s)) if starts_s else self._usual_start_s

    @property
    def setup_s(self) -> float:
        """Seconds of a probe before its first step, with workers that are there."""
        ran = [one for _, one in self.history if one.status == "ok" and one.seconds is not None]
        setups_s = [max((one.seconds or 0.0) - (one.start_s or 0.0) - self._steps_s(one), 0.0) for one in ran]
        return float(np.median(setups_s)) if setups_s else 0.0

    def _steps_s(self, one: Observation) -> float:
        return float(np.sum(one.steps_s)) * (1 + self._warmup_steps / max(len(one.steps_s), 1))

    @property
    def spent_gpu_s(self) -> float:
        """GPU-seconds of all probes; where one does not say what it took, what such a probe usually takes."""
        spent, group = 0.0, 0.0
        for row, one in self.history:
            workers = float(self.layout.workers_M[row]) if one.status != "infeasible" else 0.0
            start_s = one.start_s if one.start_s is not None else 0.0 if group == workers else self.start_s
            usual_s = start_s + (self._steps_s(one) if one.status == "ok" else OOM_S)
            spent += workers * (one.seconds if one.seconds is not None else usual_s)
            group = workers or group
        return spent

    def _probe_gpu_s_M(self, step_s_M: Array, group: float | None) -> Array:
        """What a probe as long as the last ones would take."""
        start_M = np.where(self.layout.workers_M == group, 0.0, self.start_s)
        steps = [MIN_STEPS, *(len(one.steps_s) for _, one in self.history if one.status == "ok")]
        steps_M = np.full(len(self.points), np.mean(steps[-8:]))
        steps_M[self.measured_rows] = self.max_steps
        return np.asarray(self.layout.workers_M * (start_M + self.setup_s + (self._warmup_steps + steps_M) * step_s_M))

    @property
    def grid_gpu_s(self) -> float:
        """GPU-seconds of a lean grid: every point once and briefly, those with as many workers on one start."""
        steps = self._warmup_steps + min(GRID_STEPS, self.max_steps)
        each_M = self.layout.workers_M * (self.setup_s + steps * self.posterior().step_s_M)
        return float(np.unique(self.layout.workers_M).sum() * self.start_s + (self.chances() * each_M).sum())

    @property
    def budget_gpu_s(self) -> float:
        """What the search may cost."""
        if self._budget_gpu_s is not None:
            return self._budget_gpu_s
        usual = max(BUDGET_GRID_SHARE, min(SMALL_GRID_SHARE, SMALL_GRID_SHARE * SMALL_GRID_POINTS / len(self.points)))
        return (self._grid_share or usual) * self.grid_gpu_s

    # What is known

    def posterior(self) -> Posterior:
        """What the measurements say of every point. Needs a point that ran."""
        if self._posterior is None or self._posterior[0] != len(self.history):
            self._posterior = len(self.history), self._fit()
        return self._posterior[1]

    def _fit(self) -> Posterior:
        rows_U, layout, rng = np.array(self.measured_rows, dtype=int), self.layout, np.random.default_rng([self._seed, 1])
        joined = [self._joined(row) for row in rows_U]
        measured = Measured.of(layout.take(rows_U), [one for one, _ in joined])
        measured = replace(measured, logs_3O=measured.logs_3O + self._drift_U(rows_U, measured.logs_3O[0]))
        noise_U = np.hypot(measured.noise_O, [error for _, error in joined])
        model = self._prior.fitted(measured)
        form_sd = _form_sd(model, measured)
        # Draws of the model and its error before the measurements, moved by what these say (Matheron's rule).
        step_SM = np.log(step_times(model.draws(DRAWS, rng), layout).step) + form_sd * self._error_SM
        away_SU = measured.logs_3O[0] + noise_U * rng.standard_normal((DRAWS, len(rows_U))) - step_SM[:, rows_U]
        among_UU = form_sd**2 * self._similar_MM[np.ix_(rows_U, rows_U)] + np.diag(noise_U**2)
        step_SM = step_SM + away_SU @ np.linalg.solve(among_UU, form_sd**2 * self._similar_MM[rows_U])
        cost_SM = step_SM + self._offset_M
        cost_M = cost_SM.mean(axis=0)
        handicap_U = cost_M[rows_U] + self._handicap_M()[rows_U]
        behind_UM = np.maximum(np.log(layout.workers_M[rows_U])[:, None] - np.log(layout.workers_M), 0.0) * self._along_front
        index_M = np.argmin(handicap_U[:, None] + behind_UM, axis=0)
        incumbent_M, behind_M = rows_U[index_M], behind_UM[index_M, np.arange(len(index_M))]
        ahead_SM = np.where(self.chances() > self._luck_S1, cost_SM[:, incumbent_M] + behind_M - cost_SM, -np.inf)
        times = step_times(model.mean_P, layout)
        return Posterior(
            form_sd=form_sd,
            step_SM=step_SM,
            step_s_M=np.exp(step_SM.mean(axis=0)),
            cost_SM=cost_SM,
            cost_M=cost_M,
            ahead_SM=ahead_SM,
            loading_M=times.supply / times.work,
            leading_U=rows_U[np.argsort(handicap_U, kind="stable")],
            incumbent_M=incumbent_M,
            to_beat_M=cost_M[incumbent_M] + behind_M,
        )

    def _drift_U(self, rows_U: Rows, logs_U: Array) -> Array:
        """What a point's short and only probe is corrected by: how far those of others were off their full measurements.

        In a short one GPUs are cool and queues are full; and another user of the cluster may have come or gone.
        """
        firsts = [next(one.steps_s for at, one in self.history if (at, one.status) == (row, "ok")) for row in rows_U]
        short_U = np.array([len(steps_s) < self.max_steps for steps_s in firsts])
        again_U = np.array([self._ended("ok").count(row) > 1 for row in rows_U])
        off_U = (logs_U - np.log([np.mean(steps_s) for steps_s in firsts]))[short_U & again_U]
        return np.where(short_U & ~again_U, off_U.sum() / (1 + len(off_U)), 0.0)

    def _handicap_M(self) -> Array:
        """What counts against a measured point, in logarithms."""
        handicap_M = np.where(self._without_room_M(), HAS_NO_ROOM, 0.0)
        for row, one in self.history:
            if one.status == "oom":
                handicap_M[row] += RAN_OUT_OF_MEMORY
            elif not one.leaves_memory:
                handicap_M[row] = max(handicap_M[row], math.log1p(self.tolerance) / 2)
        return handicap_M

    # What to do next

    def ask(self, group: float | None = None) -> Point | None:
        """The next point to probe; None when no further probe is worth it, or none is left.

        `group` is the num_workers of the group that would probe it: a point with as many pays for no start.
        """
        row, self._why = self._next(group)
        if row is None:
            self._why += self._left_out()
            return None
        self.pending.append(row)
        return self.points[row]

    def _next(self, group: float | None) -> tuple[int | None, str]:
        chance_M, open_M = self.chances(), np.ones(len(self.points), dtype=bool)
        open_M[[*self.measured_rows, *self.pending]] = False
        untested, open_M = bool(open_M.any()), open_M & (chance_M > 0)
        lost = bool(self._without_room_M()[self.measured_rows].all())
        if lost and open_M.any():
            small_M = open_M & (self.layout.batch_M <= np.median(self.layout.batch_M[open_M]))
            step_s_M = step_times(self._prior.mean_P, self.layout).step
            gpu_s_M = self._probe_gpu_s_M(step_s_M, group) / np.maximum(chance_M, 1e-3) ** 8
            row = int(np.argmin(np.where(small_M, gpu_s_M, np.inf)))
            nothing_runs = "no measured point can run any more" if self.measured_rows else "nothing has run yet"
            return row, f"{nothing_runs}, and {self._name(row)} is cheap to try"
        if not self.measured_rows:
            return None, "no point is left that can run"
        known, best, tolerance = self.posterior(), self._name(self.posterior().best), self.tolerance
        gpu_s_M = self._probe_gpu_s_M(known.step_s_M, group)
        budget_gpu_s = self.budget_gpu_s
        left_gpu_s = budget_gpu_s - self.spent_gpu_s - float(gpu_s_M[self.pending].sum())
        affordable_M = open_M & (gpu_s_M < left_gpu_s - RESERVE * budget_gpu_s)
        if self._better(affordable_M) > DOUBT:
            gain_M = np.maximum(known.ahead_SM, 0.0).mean(axis=0)
            row = int(np.argmax(np.where(affordable_M, gain_M / gpu_s_M, -1.0)))
            return row, f"{self._name(row)} is expected to gain {gain_M[row]:.1%} on {self._name(int(known.incumbent_M[row]))}"
        if (check := self._check(affordable_M, gpu_s_M, left_gpu_s)) is not None:
            return check, f"{self._name(check)} is measured to check what is predicted near {best}"
        leader = self._leader(gpu_s_M < left_gpu_s, group)
        if leader is not None:
            return leader, f"{self._name(leader)} is measured again: it may be the best"
        better = self._better(open_M)
        if not open_M.any():
            ends = f"every point{' that is expected to run' if untested else ''} was measured"
        elif better > DOUBT:
            ends = f"the budget is spent; an untested point is more than {tolerance:.1%} better than {best} with {better:.0%}"
        else:
            ends = f"no untested point is more than {tolerance:.1%} better than {best}, with a probability of {1 - better:.0%}"
        return None, f"{ends}; no measured point can run on the nodes that are left" if lost else ends + self._lead()

    def _better(self, which_M: Flags) -> float:
        """The probability that one of these points is better than its incumbent by more than the tolerance."""
        return float((self.posterior().ahead_SM[:, which_M] > math.log1p(self.tolerance)).any(axis=1).mean())

    def _check(self, open_M: Flags, gpu_s_M: Array, left_gpu_s: float) -> int | None:
        """The best one of the points that would show an error of the model, or another user of the cluster; None: none is left.

        Those have a number of workers that none has, with the best point's batch; or with its workers another batch or number
        of loader workers, or with its batch too another value of an extra key. Values next to its own are tried however bad
        they are expected to be. After them comes the best one of each number of workers, again.
        """
        known, layout, tries = self.posterior(), self.layout, self._ended("ok", "failed", "oom")
        workers_M, batch_M, best = layout.workers_M, layout.batch_M, known.best
        tried_M = np.isin(np.arange(len(self.points)), [*self.measured_rows, *self.pending])
        here_M, alike_M = workers_M == workers_M[best], batch_M == batch_M[best]
        same_M = alike_M | (batch_M * workers_M == batch_M[best] * workers_M[best])
        doubt = max(known.form_sd - FORM_SD, 0.0)
        may_lead_M = known.cost_M <= known.cost_M[best] + CHECK_LOSS + 2 * doubt
        new_M = np.zeros_like(here_M)
        sides = [(workers_M, same_M), (layout.threads_M, here_M), (batch_M, here_M)]
        for values_M, side_M in (*sides, *((values_M, here_M & alike_M) for values_M in layout.member_KM)):
            options = np.unique(values_M[side_M & (open_M | tried_M)])
            at = int(np.searchsorted(options, values_M[best]))
            near_M = np.isin(values_M, options[max(at - 1, 0) : at + 2])
            new_M |= side_M & (near_M | may_lead_M) & ~np.isin(values_M, values_M[side_M & tried_M])
        best_of = {workers_M[row]: row for row in reversed(known.leading_U.tolist())}.values()
        again_M = np.isin(np.arange(len(self.points)), [row for row in best_of if tries.count(row) == 1]) & may_lead_M
        again_M[self.pending] = False
        again_M &= self.chances() > 0
        is_affordable_M = gpu_s_M < min(left_gpu_s, (CHECK_SHARE + doubt) * self.grid_gpu_s - self.spent_gpu_s)
        for which_M in (new_M & open_M & is_affordable_M, again_M & is_affordable_M):
            if which_M.any():
                return int(np.argmin(np.where(which_M, known.cost_M, np.inf)))
        return None

    def _leader(self, affordable_M: Flags, group: float | None) -> int | None:
        """One of the leading points, to measure again in turn; None: no other may be better by more than the tolerance."""
        known, tries = self.posterior(), self._ended("ok", "failed", "oom")
        rows = self._leading()
        better_SL = known.cost_SM[:, [known.best]] - known.cost_SM[:, rows] > math.log1p(self.tolerance)
        close = [row for row in rows[:NUM_REPEATED] if tries.count(row) < 2]
        if not close and better_SL.any(axis=1).mean() > DOUBT:
            chances = better_SL.mean(axis=0)
            close = [row for row, chance in zip(rows, chances, strict=True) if chance > LEADER_CHANCE or row == known.best]
        close = [row for row in close if row not in self.pending and affordable_M[row] and tries.count(row) < MAX_REPEATS]
        return min(close, key=lambda row: (tries.count(row), self.layout.workers_M[row] != group), default=None)

    def _leading(self) -> list[int]:
        """The best measured points that can run, the best one first."""
        known, chance_M = self.posterior(), self.chances()
        return [row for row in known.leading_U[:LEADERS].tolist() if chance_M[row] > 0 or row == known.best]

    def _lead(self) -> str:
        """What the measurements say of the best one, as the end of a sentence."""
        known = self.posterior()
        rows = sorted(self._leading(), key=lambda row: known.cost_M[row])
        if len(rows) < 2:
            return ""
        if rows[0] != known.best:
            return f"; {self._name(rows[0])} is as fast within the tolerance, but leaves too little memory"
        lead_S = known.cost_SM[:, rows[1]] - known.cost_SM[:, rows[0]]
        times = self._ended("ok").count(rows[0])
        measured = f"measured {times} times" if times > 1 else "measured once"
        equal = "" if lead_S.mean() > 1.645 * lead_S.std() else ": they are equal as far as was measured"
        return f"; it was {measured} and leads the next one by {lead_S.mean():.1%} ± {1.645 * lead_S.std():.1%}{equal}"

    def _left_out(self) -> str:
        """What the search has not tried since it most likely cannot run, as the end of a sentence."""
        left_M, no_room_M = self.chances() == 0, self._without_room_M()
        left_M[[row for row, _ in self.history]] = False
        memory_M = left_M & (self._chance_to_fit() == 0) & ~no_room_M
        parts = (
            (memory_M, "would not fit into memory"),
            (left_M & no_room_M, "would find no room on the cluster"),
            (left_M & ~no_room_M & ~memory_M, "would fail"),
        )
        counted = [f"{int(which_M.sum())} that {what}" for which_M, what in parts if which_M.any()]
        return f"; not tried: {', '.join(counted)}" if counted else ""

    def should_stop(self, steps_s: Sequence[float], point: Point) -> bool:
        """Whether the mean step time of a point's probe is known well enough, or the probe has had its steps.

        That is to 5%; a point that was measured before has all its steps, and what is far from the best is worth no long probe
        (Maron and Moore 1994, "Hoeffding races"). Where loading matters a probe outlasts what was loaded before it.
        """
        row, known = self.row[identity(point)], self.posterior() if self.measured_rows else None
        if len(steps_s) >= self.max_steps or row in self.measured_rows:
            return len(steps_s) >= self.max_steps
        waits = known is None or known.loading_M[row] >= LOADING
        if len(steps_s) < min(MIN_STEPS + waits * PREFETCH * self.layout.threads_M[row], self.max_steps):
            return False
        steps_s, error = self._settled(row, steps_s), STOP_ERROR
        if known is not None:
            late = math.log(float(np.mean(steps_s))) + self._offset_M[row] - known.to_beat_M[row]
            error = max(STOP_ERROR, BEHIND_ERROR * late)
        return 1.96 * relative_error(steps_s) <= error

    # What came out

    def best(self) -> Point | None:
        """The best measured point, by its own measurements and the model; None where nothing ran."""
        return self.points[self.posterior().best] if self.measured_rows else None

    def front(self) -> list[Point]:
        """The measured points that no other one beats in speed and cost, the fewest workers first."""
        if not self.measured_rows:
            return []
        rows_U = self.posterior().leading_U
        time_U = np.log(self.posterior().step_s_M[rows_U] / [float(self.points[row][GLOBAL_BATCH]) for row in rows_U])
        return [self.points[rows_U[index]] for index in front(self.layout.workers_M[rows_U], time_U)]

    def bound(self) -> float:
        """With a probability of 90% no point that can run is better than the best one by more than this share.

        With the metric `pareto`: than those that keep it off the front. Infinite where nothing ran.
        """
        if not self.measured_rows:
            return math.inf
        return max(REPEAT_SD, math.expm1(float(np.quantile(self.posterior().ahead_SM.max(axis=1), 1 - DOUBT))))

    def step_s(self) -> Array:
        """Seconds of a step of every point, in the order of `points`. Needs a point that ran."""
        return self.posterior().step_s_M

    def why(self) -> str:
        """Why the last answer of `ask` was given, in a sentence."""
        return self._why

    def _name(self, row: int) -> str:
        return describe_point(self.points[row])


def front(workers_U: Array, time_U: Array) -> list[int]:
    """Indices of the points that no other one beats in speed and cost, the fewest workers first.

    `time_U` is the logarithm of the time for an image; n workers that take t for an image cost n·t. More workers have to make
    up for their cost; fewer that are as fast are better in both.
    """
    behind_UU = np.maximum(np.log(workers_U)[:, None] - np.log(workers_U), 0.0)
    best_U = np.argmin(time_U[:, None] + behind_UU, axis=0)
    return sorted(np.flatnonzero(best_U == np.arange(len(time_U))).tolist(), key=lambda index: float(workers_U[index]))


def _form_sd(model: StepTime, measured: Measured) -> float:
    """Standard deviation of the model's own error: its residuals, each as if its point had been left out of the fit."""
    J_OP, step_O = model.slopes(measured.layout), step_times(model.mean_P, measured.layout).step
    explained_O = np.einsum("op,pq,oq->o", J_OP, model.covariance_PP, J_OP)
    residual_O, unexplained_O = (
        measured.logs_3O[0] - np.log(step_O),
        np.maximum(1 - explained_O / np.hypot(measured.noise_O, 0.03) ** 2, 0.1),
    )
    squares_O = np.maximum(np.minimum(residual_O**2, 0.25) / unexplained_O - measured.noise_O**2, 0.0)
    return math.sqrt((FORM_WEIGHT * FORM_SD**2 + squares_O.sum()) / (FORM_WEIGHT + len(squares_O)))
