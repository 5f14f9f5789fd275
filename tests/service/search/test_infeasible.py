"""What one point's failure says of others: as little as it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.search.infeasible import failing, lost, unschedulable, values
from service.search.points import Hardware, Layout, Observation
from tests.service.search.queues import grid, point

POINTS = [
    {**at, "data.decoder": decoder} for at in grid([1, 2, 4, 8], [256], [1, 4, 8]) for decoder in ("pillow", "simplejpeg", "gpu")
]
LAYOUT = Layout.of(POINTS, Hardware(2, 4, 16), ())


def at(workers: int, threads: int, decoder: str = "pillow") -> int:
    return POINTS.index(point(workers, 256, threads, data__decoder=decoder))


def told(*pairs: tuple[int, str]) -> list[tuple[int, Observation]]:
    return [(row, Observation(status)) for row, status in pairs]  # type: ignore[arg-type]


def without_room(*pairs: tuple[int, str]) -> set[tuple[int, int]]:
    return {(p["scale.num_workers"], p["data.loader_workers"]) for p in chosen(unschedulable(LAYOUT, told(*pairs)))}


def left_alone(*pairs: tuple[int, str]) -> list[Mapping[str, Any]]:
    return chosen(failing(LAYOUT, values(POINTS), told(*pairs)))


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
    assert chosen(lost(LAYOUT, told((at(8, 4), "ok"), (at(4, 8), "infeasible")))) == chosen(
        unschedulable(LAYOUT, told((at(4, 8), "infeasible")))
    )  # no point with as many loader workers ever ran: maybe no node has so many CPUs
    shrunk = (at(8, 4), "ok"), (at(4, 4), "infeasible")
    assert {p["scale.num_workers"] for p in chosen(lost(LAYOUT, told(*shrunk)))} == {4, 8}
    assert len(chosen(lost(LAYOUT, told(*shrunk)))) == len(POINTS) / 2
    assert chosen(lost(LAYOUT, told(*shrunk, (at(8, 4), "ok")))) == []


def test_one_failure_is_nobodys_fault() -> None:
    assert left_alone((at(8, 8, "gpu"), "failed")) == []


def test_a_value_that_failed_with_different_workers_is_left_alone_and_no_other() -> None:
    found = left_alone((at(8, 8, "gpu"), "failed"), (at(2, 1, "gpu"), "failed"))
    assert {p["data.decoder"] for p in found} == {"gpu"}
    assert len(found) == len(POINTS) / 3


def test_a_value_that_ran_once_is_not_to_blame() -> None:
    assert left_alone((at(8, 8, "gpu"), "failed"), (at(2, 1, "gpu"), "failed"), (at(1, 1, "gpu"), "ok")) == []


def test_two_failures_that_share_a_value_and_the_workers_leave_both_open_where_they_are_apart() -> None:
    twice = [(at(4, 8, "gpu"), "failed"), (at(4, 1, "gpu"), "failed")]
    assert {(p["scale.num_workers"], p["data.decoder"]) for p in left_alone(*twice)} == {(4, "gpu"), (8, "gpu")}
    workers = left_alone(*twice, (at(4, 4, "pillow"), "failed"))
    assert {p["scale.num_workers"] for p in workers} == {4, 8}
    assert len(workers) == len(POINTS) / 2
    decoder = left_alone(*twice, (at(4, 4, "pillow"), "ok"))
    assert {p["data.decoder"] for p in decoder} == {"gpu"}
    assert len(decoder) == len(POINTS) / 3


def test_workers_that_failed_twice_are_left_alone_with_all_above_them() -> None:
    found = left_alone((at(4, 8, "gpu"), "failed"), (at(4, 1, "pillow"), "failed"), (at(2, 1), "oom"))
    assert {p["scale.num_workers"] for p in found} == {4, 8}
    assert left_alone((at(4, 8, "gpu"), "failed"), (at(4, 1, "pillow"), "failed"), (at(8, 1), "ok")) == []


def test_a_point_that_failed_may_be_tried_once_more_and_its_second_failure_says_nothing_of_others() -> None:
    assert left_alone((at(8, 8, "gpu"), "failed")) == []
    assert left_alone((at(8, 8, "gpu"), "failed"), (at(8, 8, "gpu"), "failed")) == [POINTS[at(8, 8, "gpu")]]
    assert left_alone((at(8, 8, "gpu"), "failed"), (at(8, 8, "gpu"), "failed"), (at(8, 8, "gpu"), "ok")) == []


def test_a_point_that_ran_on_its_second_try_blames_nothing() -> None:
    assert left_alone((at(4, 8, "gpu"), "failed"), (at(4, 8, "gpu"), "ok"), (at(8, 1, "gpu"), "failed")) == []
