"""The searchers that see a black box: hill climbing as an engineer does it, a Gaussian process, Optuna's TPE, random, ASHA, BOHB.

Each spends a given number of GPU-seconds, a probe being the product's own: its warm-up, 60 steps. All are given what favours
them: an order of the values where there is one, points that cannot be planned for nothing, the last probe although it goes over
the budget, and no second measurement where one proposes a point again without a wish to know it better.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.benchmarks.simulation.cluster import LEAN_STEPS, Cluster, Point, as_figure
from tests.benchmarks.simulation.session import STEPS, Probe

ETA, RUNGS = 3, (20, 60, 180)
"""Of ASHA and BOHB: a third goes on to three times as many steps."""
PATIENCE = 200
"""Proposals in a row that cost nothing, after which a searcher has nothing more to propose."""
FINAL_SHARE, FINALISTS = 0.85, 2
"""Hill climbing: where this share of the budget is spent, the best points are measured once more."""
CLIMBED = ("data.global_batch_size", "data.loader_workers", "any other", "scale.num_workers")
"""Hill climbing: the axes in their order."""
ROUND = 12
"""Random: so many points are drawn at a time and tried in the order of their num_workers, which shares their starts."""
Search = Callable[[Cluster, float, int, str], Point | None]


class Account:
    """What was measured, in the metric's own sense (the larger the better), and what may still be spent."""

    def __init__(self, cluster: Cluster, budget_gpu_s: float, seed: int, metric: str) -> None:
        self.session, self._budget_gpu_s, self._metric = cluster.session(seed), budget_gpu_s, metric
        self._num_images = cluster.plant.num_images
        self.figures: dict[int, float] = {}
        self._measured: dict[int, list[float]] = {}
        self._idle = 0

    @property
    def open(self) -> bool:
        return self.spent < 1.0 and self._idle < PATIENCE

    @property
    def spent(self) -> float:
        """Share of the budget."""
        return self.session.gpu_s / self._budget_gpu_s if self._budget_gpu_s else 1.0

    def measure(self, index: int, again: bool = False, steps: int = STEPS) -> float | None:
        """The figure of a point, measured unless it is known (or `again`: the mean of all); None where it does not run."""
        if index in self.figures and not again:
            self._idle += 1
            return self.figures[index] if np.isfinite(self.figures[index]) else None
        probe = self.session.probe(self.session.cluster.points[index], steps)
        self._idle = self._idle + 1 if probe.status == "infeasible" else 0
        if probe.status == "ok":
            self._measured.setdefault(index, []).append(self.figure(probe))
        self.figures[index] = float(np.mean(self._measured[index])) if index in self._measured else -np.inf
        return self.figures[index] if probe.status == "ok" else None

    def figure(self, probe: Probe) -> float:
        return as_figure(probe.point, probe.step_s, self._num_images, self._metric) if len(probe.steps_s) else -np.inf

    def worse_than_all(self) -> float:
        """A figure for a point that does not run: 0 images a second, or twice the highest cost."""
        lowest = min((figure for figure in self.figures.values() if np.isfinite(figure)), default=0.0)
        return lowest - abs(lowest)

    def ranked(self) -> list[int]:
        """The points that ran, the best first."""
        return sorted((i for i in self.figures if np.isfinite(self.figures[i])), key=lambda i: -self.figures[i])

    def best(self) -> Point | None:
        return next((self.session.cluster.points[index] for index in self.ranked()), None)


def hill_climbing(cluster: Cluster, budget_gpu_s: float, seed: int, metric: str) -> Point | None:
    """From the middle, one axis at a time while that helps, until nothing does; then anew from elsewhere.

    It begins with all GPUs (with the fewest where cost is what counts), and turns to what needs a new start last. A point that
    fails without being out of memory is tried once more; the two best are measured again before the choice.
    """
    account, axes = Account(cluster, budget_gpu_s, seed, metric), Axes(cluster.points)
    rng = np.random.default_rng([cluster.seed, seed, 2])

    def figure(ranks: list[int]) -> float:
        index = axes.index(ranks)
        found = account.measure(index)
        if found is None and cluster.status(cluster.points[index]) == "ok" and account.open and index not in retried:
            retried.add(index)
            found = account.measure(index, again=True)
        return -np.inf if found is None else found

    retried: set[int] = set()
    names, sizes = list(axes.values), [len(values) for values in axes.values.values()]
    in_turn = sorted(range(len(names)), key=lambda axis: CLIMBED.index(names[axis]) if names[axis] in CLIMBED else 2)
    start = [size // 2 for size in sizes]
    start[names.index("scale.num_workers")] = 0 if metric == "gpu_s_per_epoch" else sizes[names.index("scale.num_workers")] - 1
    while account.open and account.spent < FINAL_SHARE:
        ranks, best = start, figure(start)
        improved = True
        while improved:
            improved = False
            for axis in in_turn:
                for way in (1, -1):
                    while 0 <= ranks[axis] + way < sizes[axis] and account.open and account.spent < FINAL_SHARE:
                        tried = [*ranks[:axis], ranks[axis] + way, *ranks[axis + 1 :]]
                        if (found := figure(tried)) <= best:
                            break
                        ranks, best, improved = tried, found, True
        start = [int(rng.integers(size)) for size in sizes]
    for index in account.ranked()[:FINALISTS]:
        if account.open:
            account.measure(index, again=True)
    return account.best()


def random(cluster: Cluster, budget_gpu_s: float, seed: int, metric: str) -> Point | None:
    """Points in any order, none of them twice."""
    account = Account(cluster, budget_gpu_s, seed, metric)
    order = np.random.default_rng([cluster.seed, seed]).permutation(len(cluster.points)).tolist()
    for first in range(0, len(order), ROUND):
        for index in sorted(order[first : first + ROUND], key=lambda i: cluster.points[i]["scale.num_workers"]):
            if account.open:
                account.measure(index)
    return account.best()


def gaussian_process(cluster: Cluster, budget_gpu_s: float, seed: int, metric: str) -> Point | None:
    """Expected improvement for the cost under scikit-learn's Gaussian process, Matérn 5/2, after eight small random points."""
    from scipy.stats import norm
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    warnings.simplefilter("ignore", ConvergenceWarning)
    account, rng = Account(cluster, budget_gpu_s, seed, metric), np.random.default_rng([cluster.seed, seed, 3])
    columns = []
    for key, values in Axes(cluster.points).values.items():
        found = [point[key] for point in cluster.points]
        columns += [[one == value for one in found] for value in values] if isinstance(values[0], str) else [np.log2(found)]
    axes_MK = np.array(columns, dtype=float).T
    axes_MK = (axes_MK - axes_MK.mean(axis=0)) / np.maximum(axes_MK.std(axis=0), 1e-9)
    workers_M = np.array([float(point["scale.num_workers"]) for point in cluster.points])
    small = np.argsort([point["data.global_batch_size"] / point["scale.num_workers"] for point in cluster.points])
    first = rng.permutation(small[: len(small) // 2])[:8].tolist()
    kernel = ConstantKernel(1.0) * Matern(np.ones(axes_MK.shape[1]), nu=2.5) + WhiteKernel(1e-3)
    while account.open:
        ran = account.ranked()
        if first or len(ran) < 2:
            account.measure(first.pop() if first else int(rng.integers(len(cluster.points))))
            continue
        figure_O = np.log([abs(account.figures[index]) for index in ran]) * np.sign(account.figures[ran[0]])
        process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0).fit(axes_MK[ran], figure_O)
        mean_M, sd_M = process.predict(axes_MK, return_std=True)
        ahead_M = (mean_M - figure_O.max()) / np.maximum(sd_M, 1e-9)
        gain_M = sd_M * (ahead_M * norm.cdf(ahead_M) + norm.pdf(ahead_M)) / workers_M
        gain_M[list(account.figures)] = -1.0
        if gain_M.max() < 0:
            break
        account.measure(int(np.argmax(gain_M)))
    return account.best()


def everything(cluster: Cluster, budget_gpu_s: float, seed: int, metric: str) -> Point | None:
    """All points once for 40 steps, whatever that costs, and the five best twice more."""
    account = Account(cluster, float("inf"), seed, metric)
    for index in sorted(range(len(cluster.points)), key=lambda i: cluster.points[i]["scale.num_workers"]):
        if account.measure(index, steps=LEAN_STEPS) is None and cluster.status(cluster.points[index]) == "ok":
            account.measure(index, again=True, steps=LEAN_STEPS)
    best, again = account.ranked()[:5], Account(cluster, float("inf"), seed, metric)
    again.session = account.session
    for index in best * 2:
        again.measure(index, again=True)
    return again.best() or account.best()


def tpe(startup_trials: int) -> Search:
    """Optuna's TPE, multivariate, after so many random trials."""

    def search(cluster: Cluster, budget_gpu_s: float, seed: int, metric: str) -> Point | None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=cluster.seed * 101 + seed, multivariate=True, n_startup_trials=startup_trials)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        account, axes = Account(cluster, budget_gpu_s, seed, metric), Axes(cluster.points)
        while account.open:
            trial = study.ask()
            ranks = [
                trial.suggest_int(key, 0, len(values) - 1)
                if axes.ordered[key]
                else values.index(trial.suggest_categorical(key, values))
                for key, values in axes.values.items()
            ]
            index = axes.index(ranks)
            figure = account.measure(index)
            if figure is None and cluster.status(cluster.points[index]) == "ok":
                study.tell(trial, state=optuna.trial.TrialState.FAIL)  # by no fault of the point: it teaches nothing
            else:
                study.tell(trial, account.worse_than_all() if figure is None else figure)
        return account.best()

    return search


def asha(cluster: Cluster, budget_gpu_s: float, seed: int, metric: str) -> Point | None:
    """Successive halving without waiting: one of the best third of a rung goes on where there is one, else a new random point."""
    fresh = iter(np.random.default_rng([cluster.seed, seed, 1]).permutation(len(cluster.points)).tolist())
    return _halving(cluster, budget_gpu_s, seed, metric, fresh, lambda rung, index, figure: None)


def bohb(cluster: Cluster, budget_gpu_s: float, seed: int, metric: str) -> Point | None:
    """ASHA's rule over the proposals of hpbandster's own BOHB: a kernel density of the best points of the largest rung."""
    import ConfigSpace
    from hpbandster.optimizers.config_generators.bohb import BOHB

    np.random.seed((cluster.seed * 101 + seed) % 2**32)  # hpbandster draws from NumPy's one generator
    warnings.simplefilter("ignore")
    axes = Axes(cluster.points)
    space = ConfigSpace.ConfigurationSpace(seed=cluster.seed * 101 + seed)
    for key, values in axes.values.items():
        ranked = ConfigSpace.UniformFloatHyperparameter(key, 0.0, len(values) - 1e-6)
        space.add(ranked if axes.ordered[key] else ConfigSpace.CategoricalHyperparameter(key, list(range(len(values)))))
    logger = logging.getLogger("raydistill.bohb")
    logger.setLevel(logging.CRITICAL)
    generator = BOHB(space, logger=logger)
    proposed: dict[int, dict[str, Any]] = {}

    def propose() -> Iterator[int]:
        for _ in range(100 * len(cluster.points)):
            config, _ = generator.get_config(RUNGS[0])
            index = axes.index([int(config[key]) for key in axes.values])
            proposed[index] = config
            yield index

    def tell(rung: int, index: int, figure: float | None) -> None:
        result = None if figure is None else {"loss": -figure}
        generator.new_result(
            SimpleNamespace(id=(index,), kwargs={"budget": RUNGS[rung], "config": proposed[index]}, result=result, exception=None)
        )

    return _halving(cluster, budget_gpu_s, seed, metric, propose(), tell)


def _halving(
    cluster: Cluster,
    budget_gpu_s: float,
    seed: int,
    metric: str,
    fresh: Iterator[int],
    tell: Callable[[int, int, float | None], None],
) -> Point | None:
    account = Account(cluster, budget_gpu_s, seed, metric)
    steps_s: dict[int, list[float]] = {}
    rungs: list[dict[int, float]] = [{} for _ in RUNGS]
    idle = 0
    while account.spent < 1.0 and idle < PATIENCE:
        rung, index = next(
            ((r + 1, i) for r in reversed(range(len(RUNGS) - 1)) if (i := _promoted(rungs[r], rungs[r + 1])) is not None), (0, -1)
        )
        if rung == 0 and (index := next(fresh, -1)) < 0:
            break
        if rung == 0 and index in rungs[0]:
            idle += 1
            continue
        spent = account.session.gpu_s
        probe = account.session.probe(cluster.points[index], RUNGS[rung] - len(steps_s.get(index, ())))
        idle = idle + 1 if account.session.gpu_s == spent else 0
        if probe.status == "infeasible":  # refused before it begins: no part of a rung, which it would make look longer
            tell(rung, index, None)
            continue
        steps_s[index] = [*steps_s.get(index, ()), *probe.steps_s]
        figure = account.figure(Probe(probe.point, probe.status, np.array(steps_s[index])))
        rungs[rung][index] = account.figures[index] = figure
        tell(rung, index, figure if probe.status == "ok" else None)
    highest = next((rung for rung in reversed(rungs) if rung), {})
    index = max(highest, key=lambda i: highest[i], default=-1)
    return cluster.points[index] if index >= 0 and np.isfinite(highest[index]) else None


def _promoted(rung: dict[int, float], above: dict[int, float]) -> int | None:
    """The best of a rung's top third that has not gone on yet."""
    top = sorted(rung, key=lambda i: -rung[i])[: len(rung) // ETA]
    return next((i for i in top if i not in above and np.isfinite(rung[i])), None)


class Axes:
    """A grid's points by the ranks of their values."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.values = {key: list(dict.fromkeys(point[key] for point in points)) for key in points[0]}
        self.ordered = {key: not isinstance(values[0], str) for key, values in self.values.items()}
        self._indices = {tuple(point.values()): index for index, point in enumerate(points)}

    def index(self, ranks: Sequence[int]) -> int:
        return self._indices[tuple(values[rank] for values, rank in zip(self.values.values(), ranks, strict=True))]


PEERS: dict[str, Search] = {
    "everything, five again": everything,
    "Gaussian process": gaussian_process,
    "hill climbing": hill_climbing,
    "TPE, 4 start-up trials": tpe(4),
    "TPE": tpe(10),
    "random": random,
    "ASHA": asha,
    "BOHB": bohb,
}
NEEDS = {"Gaussian process": "sklearn", "TPE, 4 start-up trials": "optuna", "TPE": "optuna", "BOHB": "hpbandster"}
"""What a peer comes with, where it is not written here."""
