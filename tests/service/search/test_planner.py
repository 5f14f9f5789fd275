"""The planner's ask and tell on made-up clusters that share no formula with its model."""

import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from service.search.planner import Planner
from service.search.points import Observation, identity
from tests.service.search.queues import CLUSTERS, ONE_NODE, SMALL, Queues, grid, point

Probed = list[tuple[Mapping[str, Any], Observation]]
each_cluster = pytest.mark.parametrize(
    "kind", [kind if kind in ("decode", "compute") else pytest.param(kind, marks=pytest.mark.slow) for kind in CLUSTERS]
)
"""The large ones take as long as all the others."""


@cache
def searched(kind: str, metric: str = "images_per_s") -> tuple[Planner, Probed, list[float]]:
    """A search to its end, what it measured and the bound after each of that."""
    cluster, points = CLUSTERS[kind]
    search, rng, seen, bounds = Planner(points, cluster.hardware, metric=metric), np.random.default_rng(0), [], []
    bounds.append(search.bound())
    while (at := search.ask(float(seen[-1][0]["scale.num_workers"]) if seen else None)) is not None:
        seen.append((at, cluster.probe(at, search, rng)))
        search.tell(*seen[-1])
        bounds.append(search.bound())
        assert len(seen) <= 200
    return search, seen, bounds


@pytest.mark.parametrize("metric", ["images_per_s", "gpu_s_per_epoch"])
@pytest.mark.parametrize("kind", [kind if kind != "network" else pytest.param(kind, marks=pytest.mark.slow) for kind in CLUSTERS])
def test_a_point_within_three_percent_of_the_best_is_found_with_few_probes(kind: str, metric: str) -> None:
    cluster, points = CLUSTERS[kind]
    search, seen, _ = searched(kind, metric)
    assert cluster.regret(search, metric) <= 0.03
    tried = [identity(at) for at, _ in seen]
    assert len(set(tried)) <= 0.35 * len(points)
    assert tried.count(identity(search.best() or {})) > 1  # nothing is called the best for one lucky measurement
    assert max(map(tried.count, tried)) <= 4
    assert sum(one.status == "oom" for _, one in seen) <= 3
    assert "more than 2.5% better than" in search.why()


def test_a_new_search_with_the_same_observations_asks_for_the_same_next_point() -> None:
    cluster, points = CLUSTERS["compute"]
    first, rng = Planner(points, cluster.hardware, seed=3), np.random.default_rng(0)
    history = []
    for _ in range(7):
        at = first.ask()
        assert at is not None
        history.append((at, cluster.probe(at, first, rng)))
        first.tell(*history[-1])
        again = Planner(points, cluster.hardware, seed=3)
        for measured in history:
            again.tell(*measured)
        expected = first.ask()
        assert again.ask() == expected
        assert again.why() == first.why()
        first.pending.clear()


def test_points_that_are_being_probed_are_not_asked_for_again() -> None:
    cluster, points = CLUSTERS["compute"]
    search, rng = Planner(points, cluster.hardware), np.random.default_rng(0)
    pending = [at for _ in range(4) if (at := search.ask()) is not None]
    for _ in range(60):
        if pending:
            at = pending.pop(0)
            search.tell(at, cluster.probe(at, search, rng))
        if (following := search.ask()) is not None:
            assert following not in pending
            pending.append(following)
        if not pending:
            break
    assert not pending
    assert cluster.regret(search) <= 0.04


def test_an_extra_key_is_searched_with_the_three_axes() -> None:
    cluster = Queues(ONE_NODE, image_decode_s=0.001, image_gpu_s=0.004, faster=0.6)
    points = [{**at, "train.precision": precision} for precision in ("fp32", "bf16") for at in SMALL]
    search = Planner(points, ONE_NODE)
    seen = cluster.search(search)
    assert cluster.regret(search) <= 0.03
    assert len(seen) <= 0.25 * len(points)


def test_a_steady_probe_ends_at_once_and_a_wild_one_at_its_limit() -> None:
    search, rng = Planner(SMALL, ONE_NODE, max_steps=50), np.random.default_rng(0)
    assert not search.should_stop([0.1] * 3, SMALL[0])
    assert search.should_stop([0.1] * 10, SMALL[0])
    assert not search.should_stop(rng.lognormal(0, 0.5, 20).tolist(), SMALL[0])
    assert search.should_stop(rng.lognormal(0, 0.5, 50).tolist(), SMALL[0])


def test_a_probe_of_many_loader_workers_sees_a_batch_of_each_of_them() -> None:
    """Each has two batches ready when the probe begins, which are no measure of how fast it makes them."""
    search = Planner(grid([1], [64], [4, 16]), ONE_NODE)
    assert not search.should_stop([0.05] * 8, point(1, 64, 4))
    assert search.should_stop([0.05] * 16, point(1, 64, 4))
    assert not search.should_stop([0.05] * 32, point(1, 64, 16))
    assert search.should_stop([0.05] * 40, point(1, 64, 16))


def test_a_probe_of_a_point_far_behind_the_best_may_end_sooner() -> None:
    search, rng = Planner(SMALL, ONE_NODE), np.random.default_rng(0)
    search.tell(point(4, 512, 4), Observation("ok", (0.2 * rng.lognormal(0, 0.08, 40)).tolist()))
    noise = rng.lognormal(0, 0.08, 60)

    def steps(at: Mapping[str, Any], step_s: float) -> int:
        return next(count for count in range(1, 61) if search.should_stop((step_s * noise[:count]).tolist(), at))

    assert steps(point(4, 512, 1), 0.4) < steps(point(4, 512, 1), 0.2)


def test_what_a_start_takes_is_known_from_the_first_one_on() -> None:
    search = Planner(SMALL, ONE_NODE, start_s=25.0)
    search.tell(point(1, 64, 4), Observation("ok", [0.1] * 8))
    assert search.start_s == 25.0
    assert search.spent_gpu_s == pytest.approx(25 + 13 * 0.1)
    for start_s in (60.0, None, 0.0, 80.0):
        search.tell(point(2, 64, 4), Observation("ok", [0.1] * 8, start_s=start_s))
    assert search.start_s == 70.0
    assert search.spent_gpu_s == pytest.approx(70 + 2 * 140 + 9 * 13 * 0.1)


@each_cluster
def test_the_bound_falls_to_the_tolerance_and_then_holds_for_what_was_not_tested(kind: str) -> None:
    cluster, points = CLUSTERS[kind]
    search, _, (before, *bounds) = searched(kind)
    assert before == math.inf
    best, tested = search.best(), {identity(points[row]) for row, _ in search.history}
    assert best is not None
    least = min(cluster.cost(other) for other in points if identity(other) not in tested and cluster.fits(other))
    assert cluster.cost(best) / least - 1 <= bounds[-1] + 0.01
    assert bounds[-1] <= 0.1 < 1 < bounds[0]  # a batch that most likely does not fit may be that much better


def test_what_a_step_of_every_point_takes_is_predicted() -> None:
    cluster, points = CLUSTERS["decode"]
    search, _, _ = searched("decode")
    off_M = [abs(step_s / cluster.parts(at)[0] - 1) for step_s, at in zip(search.step_s(), points, strict=True)]
    assert np.median(off_M) <= 0.2


@each_cluster
def test_the_front_of_speed_and_cost_is_found_to_three_percent(kind: str) -> None:
    cluster, points = CLUSTERS[kind]
    search, seen, _ = searched(kind, "pareto")
    found = [(at["scale.num_workers"], cluster.cost(at)) for at in search.front()]
    assert [workers for workers, _ in found] == sorted({workers for workers, _ in found})
    assert all(time_s > later_s for (_, time_s), (_, later_s) in pairwise(found))
    for at in filter(cluster.fits, points):  # no point is faster and cheaper by more than that than all that were found
        workers, time_s = at["scale.num_workers"], cluster.cost(at)
        assert min(other_s * max(1, more / workers) for more, other_s in found) / time_s - 1 <= 0.03
    distinct = {identity(at) for at, _ in seen}
    assert len(distinct) <= 0.45 * len(points)
    assert len(seen) <= 1.5 * len(distinct)  # known points are measured again, but that is not most of the search
    best = search.best()
    assert best is not None
    assert cluster.cost(best) == found[-1][1]


def test_a_factor_makes_the_time_to_a_target_what_is_searched_for() -> None:
    cluster, points = CLUSTERS["compute"]

    def images_to_target(at: Mapping[str, Any]) -> float:  # small batches learn more from an image
        return 1e6 * (1 + at["data.global_batch_size"] / 300)

    fastest, _, _ = searched("compute")
    first = Planner(points, cluster.hardware, factor=images_to_target)
    cluster.search(first)
    best, rest = first.best(), [cluster.cost(at) * images_to_target(at) for at in points]
    assert best is not None
    assert cluster.cost(best) * images_to_target(best) / min(rest) - 1 <= 0.03
    assert best != fastest.best()


def test_nothing_measured_has_no_best_and_says_so() -> None:
    search = Planner(SMALL, ONE_NODE)
    assert search.best() is None
    assert search.front() == []
    assert search.why() == "nothing was measured yet"


def test_when_all_was_measured_there_is_nothing_left_to_ask() -> None:
    search = Planner(SMALL[:2], ONE_NODE)
    for at in (*SMALL[:2], *SMALL[:2]):
        search.tell(at, Observation("ok", [0.1] * 8))
    assert search.ask() is None
    assert search.why().startswith("every point was measured")
    assert search.bound() <= 0.03  # what the noise leaves open


def test_a_cluster_that_lost_the_nodes_of_all_that_was_measured_ends_the_search_with_what_was_the_best() -> None:
    search = Planner(grid([2], [64, 128, 256], [1]), ONE_NODE)
    search.tell(point(2, 64, 1), Observation("ok", [0.2] * 8))
    search.tell(point(2, 128, 1), Observation("ok", [0.3] * 8))
    search.tell(point(2, 256, 1), Observation("infeasible"))
    assert search.ask() is None
    assert "no measured point can run on the nodes that are left" in search.why()
    assert search.best() == point(2, 128, 1)
    assert search.front() == [point(2, 128, 1)]


def test_a_cluster_that_lost_the_nodes_of_all_that_was_measured_is_searched_for_what_still_runs() -> None:
    search = Planner(grid([1, 4], [64, 128, 256, 512, 1024], [1]), ONE_NODE)
    for batch in (64, 128, 256, 512):
        search.tell(point(4, batch, 1), Observation("ok", [0.01] * 8))
    search.tell(point(4, 1024, 1), Observation("infeasible"))
    at = search.ask()
    assert at is not None
    assert at["scale.num_workers"] == 1
    search.tell(at, Observation("ok", [0.5] * 8))
    assert search.best() == at


@pytest.mark.parametrize("budget", [{"budget_grid_share": 0.05}, {"budget_gpu_s": 150.0}])
def test_a_search_ends_when_its_budget_is_spent_and_says_what_it_leaves_open(budget: dict[str, float]) -> None:
    cluster, points = CLUSTERS["decode"]
    search = Planner(points, cluster.hardware, start_s=5.0, **budget)  # type: ignore[arg-type]
    cluster.search(search)
    assert search.spent_gpu_s <= 1.1 * search.budget_gpu_s
    assert "the budget is spent; an untested point is more than 2.5% better than" in search.why()


def test_of_points_that_are_as_good_the_one_with_memory_to_spare_is_the_best() -> None:
    search, points = Planner(grid([1], [64, 128], [1]), ONE_NODE), grid([1], [64, 128], [1])
    for at, step_s, peak_mib in zip(points, (0.1, 0.199), (500.0, 990.0), strict=True):
        for _ in range(3):
            search.tell(at, Observation("ok", [step_s] * 60, peak_memory_mib=peak_mib, gpu_memory_mib=1000.0))
    assert search.best() == points[0]


def test_two_measurements_of_a_point_that_differ_widely_leave_it_in_doubt() -> None:
    in_doubt, known = Planner(SMALL, ONE_NODE), Planner(SMALL, ONE_NODE)
    for step_s in (0.1, 0.2):
        in_doubt.tell(point(1, 64, 4), Observation("ok", [step_s] * 60))
        known.tell(point(1, 64, 4), Observation("ok", [0.15] * 60))
    row = known.row[identity(point(1, 64, 4))]
    assert in_doubt.posterior().step_SM[:, row].std() > 2 * known.posterior().step_SM[:, row].std()
