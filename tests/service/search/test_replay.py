"""A planner made from records alone."""

from __future__ import annotations

import pytest

from service.search.replay import conclusion, observation, point_of, replay
from tests.service.search.rows import grid, result, row, step_s


def test_a_replayed_planner_asks_what_the_one_that_lived_asks() -> None:
    points = grid()
    lived = replay(result([row(n, point, "pending") for n, point in enumerate(points)]))
    rows = {n: row(n, point, "pending") for n, point in enumerate(points)}
    asked = lived.ask()
    for turn in range(6):
        assert asked is not None
        number = points.index(dict(asked))
        rows[number] = row(number, asked, ended_s=100.0 + turn)
        lived.tell(asked, observation(rows[number]))
        asked = lived.ask()
        assert replay(result(list(rows.values()))).ask() == asked


def test_the_point_of_a_row_has_loader_workers_as_they_were_resolved() -> None:
    auto = row(0, grid()[0]) | {"params": {"data.loader_workers": "auto", "precision": "bf16"}}
    assert point_of(auto) == {**grid()[0], "precision": "bf16"}


def test_what_the_cluster_never_held_is_no_point_of_the_search() -> None:
    rows = [row(n, point, "infeasible" if n else "pending") for n, point in enumerate(grid())]
    assert replay(result(rows)).points == [grid()[0]]


def test_a_row_without_the_times_of_its_steps_counts_as_one_step() -> None:
    old = {key: value for key, value in row(0, grid()[0]).items() if key not in ("steps_s", "start_s", "ended_s")}
    assert observation(old).steps_s == [step_s(grid()[0])]


def test_records_that_do_not_say_on_what_cluster_say_so() -> None:
    old = result([row(0, grid()[0])])
    del old["hardware"]
    with pytest.raises(ValueError, match="the records of formula do not say what cluster it ran on"):
        replay(old)


def test_a_search_concludes_with_the_best_point_what_it_left_out_and_why() -> None:
    points = grid()
    rows = [row(n, point, "pending") for n, point in enumerate(points)]
    for turn in range(len(points)):
        asked = replay(result(rows)).ask()
        if asked is None:
            break
        number = points.index(dict(asked))
        rows[number] = row(number, asked, ended_s=1.0 + turn)
    said = conclusion(result(rows))
    best = min(points, key=lambda point: step_s(point) / point["data.global_batch_size"])
    assert said["best"]["params"] == best
    assert {one["status"] for one in said["trials"]} == {"ok", "untested"}
    measured = [one for one in rows if one["status"] == "ok"]
    assert said["search"]["spent_gpu_s"] == sum(10.0 * one["scale"]["scale.num_workers"] for one in measured)
    assert said["search"]["bound_pct"] < 6
    assert "better than 4 workers, global batch 512, 4 loader workers" in said["search"]["why"]
