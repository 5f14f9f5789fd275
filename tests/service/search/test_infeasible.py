"""What one point's failure says of others: as little as it must."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from service.search.infeasible import chances_after_failures, lost_with_nodes, unschedulable, values
from service.search.points import Array, Hardware, Layout, Observation
from tests.service.search.queues import grid, point

POINTS = [
    {**at, "data.decoder": decoder} for at in grid([1, 2, 4, 8], [256], [1, 4, 8]) for decoder in ("pillow", "simplejpeg", "gpu")
]
LAYOUT = Layout.of(POINTS, Hardware(2, 4, 16), ())


def at(workers: int, threads: int, decoder: str = "pillow") -> int:
    return POINTS.index(point(workers, 256, threads, data__decoder=decoder))


def history_of(*pairs: tuple[int, str]) -> list[tuple[int, Observation]]:
    return [(row, Observation(status)) for row, status in pairs]  # type: ignore[arg-type]


def without_room(*pairs: tuple[int, str]) -> set[tuple[int, int]]:
    return {(p["scale.num_workers"], p["data.loader_workers"]) for p in chosen(unschedulable(LAYOUT, history_of(*pairs)))}


def chances(*pairs: tuple[int, str]) -> Array:
    return chances_after_failures(LAYOUT, values(POINTS), history_of(*pairs))


def failed(*rows: int) -> list[tuple[int, str]]:
    return [(row, "failed") for row in rows]


def chosen(flags: Sequence[bool]) -> list[Mapping[str, Any]]:
    return [p for p, flag in zip(POINTS, flags, strict=True) if flag]


def test_a_point_without_a_place_speaks_for_those_that_need_as_much_of_both() -> None:
    assert without_room() == set()
    assert without_room((at(4, 4), "infeasible")) == {(4, 4), (4, 8), (8, 4), (8, 8)}
    both = without_room((at(4, 4), "infeasible"), (at(2, 8), "infeasible"))
    assert both == {(2, 8), (4, 4), (4, 8), (8, 4), (8, 8)}


def test_many_workers_with_few_loader_workers_stay_open_whatever_their_crowded_neighbours_met() -> None:
    assert (8, 1) not in without_room((at(4, 4), "infeasible"), (at(8, 8), "infeasible"), (at(8, 4), "infeasible"))


def test_a_cluster_that_grew_back_has_its_places_again() -> None:
    lost = [(at(8, 4), "ok"), (at(4, 1), "infeasible")]  # it ran before the cluster shrank: that says nothing now
    assert (8, 4) in without_room(*lost)
    assert without_room(*lost, (at(8, 1), "ok")) == set()
    assert without_room(*lost, (at(2, 8), "ok")) == without_room(*lost)


def test_what_ran_on_a_larger_cluster_is_lost_with_its_nodes() -> None:
    assert chosen(lost_with_nodes(LAYOUT, history_of((at(8, 4), "ok"), (at(4, 8), "infeasible")))) == chosen(
        unschedulable(LAYOUT, history_of((at(4, 8), "infeasible")))
    )  # no point with as many loader workers ever ran: maybe no node has so many CPUs
    shrunk = (at(8, 4), "ok"), (at(4, 4), "infeasible")
    assert {p["scale.num_workers"] for p in chosen(lost_with_nodes(LAYOUT, history_of(*shrunk)))} == {4, 8}
    assert len(chosen(lost_with_nodes(LAYOUT, history_of(*shrunk)))) == len(POINTS) / 2
    assert chosen(lost_with_nodes(LAYOUT, history_of(*shrunk, (at(8, 4), "ok")))) == []


def test_without_failures_everything_runs() -> None:
    assert chances().tolist() == [1.0] * len(POINTS)
    assert chances((at(8, 8), "ok"), (at(4, 1), "oom"), (at(2, 1), "infeasible")).tolist() == [1.0] * len(POINTS)


def test_one_failure_says_little_of_others_and_more_of_its_own_point() -> None:
    found = chances(*failed(at(8, 8, "gpu")))
    assert 0.5 < found[at(8, 1)] == found[at(1, 1, "gpu")] < 1
    assert found[at(1, 1)] == 1
    assert found[at(8, 8, "gpu")] < found[at(8, 1, "gpu")] < found[at(8, 1)]


def test_two_failures_make_a_value_unlikely_and_three_next_to_impossible() -> None:
    rows = [at(8, 8, "gpu"), at(2, 1, "gpu"), at(1, 4, "gpu")]
    once, twice, thrice = (float(chances(*failed(*rows[:count]), (at(8, 1), "ok"))[at(1, 1, "gpu")]) for count in (1, 2, 3))
    assert once == pytest.approx(1 / (1 + 0.02 / 0.05))
    assert twice == pytest.approx(1 / (1 + 0.02 / 0.05**2))  # 11%: it is tried once more where it may win
    assert thrice == pytest.approx(1 / (1 + 0.02 / 0.05**3))
    assert thrice < 0.02 < 0.05 < twice


def test_a_value_that_ran_once_is_not_broken() -> None:
    found = chances(*failed(at(8, 8, "gpu"), at(2, 1, "gpu")), (at(8, 1, "gpu"), "ok"))
    assert all(found[row] == 1 for row in range(len(POINTS)) if row not in (at(8, 8, "gpu"), at(2, 1, "gpu")))


def test_failures_that_share_a_value_and_the_workers_leave_both_open_where_they_are_apart() -> None:
    rows = [at(4, 8, "gpu"), at(4, 1, "gpu"), at(8, 4, "gpu")]
    found = chances(*failed(*rows))
    assert found[at(8, 8, "gpu")] < 0.02
    assert 0.4 < found[at(2, 1, "gpu")] < 0.6
    assert 0.4 < found[at(8, 1, "pillow")] < 0.6
    workers = chances(*failed(*rows, at(4, 4, "pillow")))
    assert workers[at(8, 1, "simplejpeg")] < 0.1 < 0.8 < workers[at(2, 1, "gpu")]
    decoder = chances(*failed(*rows), (at(8, 4, "pillow"), "ok"))
    assert decoder[at(2, 1, "gpu")] < 0.02
    assert decoder[at(8, 1, "pillow")] == 1


def test_two_broken_values_are_both_found() -> None:
    broken = failed(*(at(workers, 1, decoder) for decoder in ("gpu", "simplejpeg") for workers in (1, 2, 4)))
    found = chances(*broken, (at(8, 8, "pillow"), "ok"))
    assert max(found[at(8, 8, "gpu")], found[at(8, 8, "simplejpeg")]) < 0.02
    assert found[at(1, 1)] == 1


def test_workers_that_failed_speak_for_all_above_them() -> None:
    rows = [at(4, 8, "gpu"), at(4, 1, "pillow"), at(4, 4, "simplejpeg")]
    found = chances(*failed(*rows), (at(2, 1), "oom"))
    assert max(found[at(8, 8)], found[at(4, 8)]) < 0.02
    assert found[at(2, 8)] > 0.9
    assert chances(*failed(*rows), (at(8, 1), "ok"))[at(4, 8)] > 0.8


def test_a_point_that_fails_again_and_again_is_given_up() -> None:
    row, ran = at(8, 8, "gpu"), (at(8, 1, "gpu"), "ok")
    once, twice, thrice = (float(chances(*failed(*[row] * count), ran)[row]) for count in (1, 2, 3))
    assert once > 0.5 > 0.15 > twice > 0.05 > 0.02 > thrice
    assert chances(*failed(row, row), (row, "ok"), ran)[row] == 1


def test_a_failure_of_a_point_that_also_ran_blames_nothing() -> None:
    both = chances((at(4, 8, "gpu"), "failed"), (at(4, 8, "gpu"), "ok"), *failed(at(8, 1, "gpu")))
    assert both.tolist() == chances((at(4, 8, "gpu"), "ok"), *failed(at(8, 1, "gpu"))).tolist()


def test_many_values_that_failed_are_weighed_in_a_moment_and_however_often() -> None:
    points = [{**POINTS[0], "optim.lr": rate} for rate in range(150)]
    layout = Layout.of(points, Hardware(2, 4, 16), ())
    history = [(row, Observation("failed")) for row in range(120)] + [(0, Observation("failed"))] * 400
    began_s = time.process_time()
    chance_M = chances_after_failures(layout, values(points), history)
    assert time.process_time() - began_s < 1
    assert np.isfinite(chance_M).all()
    assert chance_M[0] < 1e-6
