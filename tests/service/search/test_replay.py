"""A planner made from records alone."""

from typing import Any

import pytest

from service.runs.result import RunResult
from service.search.replay import conclusion, observation, phase_seconds, replay, time_to_accuracy_search
from service.search.rows import measurements, point_of
from service.search.time_to_accuracy import TimeToAccuracySearch
from tests.service.search.rows import grid, result, row, step_s, typed


def measured(rows: Any, number: int, point: Any, ended_s: float) -> dict[str, Any]:
    """Put a further measurement of a point into its row."""
    before, one = measurements(typed(rows[number])), row(number, point, ended_s=ended_s)
    rows[number] = {**one, "measurements": [*(outcome.model_dump() for outcome in before), one]} if before else one
    return one


def test_a_replayed_planner_asks_what_the_one_that_lived_asks() -> None:
    points = grid()
    lived = replay(result([row(n, point, "pending") for n, point in enumerate(points)]))
    rows = {n: row(n, point, "pending") for n, point in enumerate(points)}
    asked = lived.ask()
    for turn in range(12):
        if asked is None:
            break
        number = points.index(dict(asked))
        lived.tell(asked, observation(typed(measured(rows, number, asked, 100.0 + turn))))
        asked = lived.ask()
        assert replay(result(list(rows.values()))).ask() == asked


def test_only_the_first_pipeline_stage_waits_for_data_the_others_for_the_first_one() -> None:
    metrics = {
        "phase/data_ms": 40.0,
        "phase/student_ms": 60.0,
        "phase/bubble_ms": 90.0,
        "rank0/data_ms": 10.0,
        "rank1/data_ms": 70.0,
    }
    assert phase_seconds(metrics) == pytest.approx({"data": 0.01, "student": 0.06, "bubble": 0.12})
    received = {
        "phase/data_ms": 5.0,
        "rank1/data_ms": 0.0,
        "phase/receive_ms": 35.0,
        "rank0/receive_ms": 0.0,
        "rank1/receive_ms": 70.0,
    }
    waits = {"bubble": 0.085, "receive": 0.035}
    assert phase_seconds(metrics | received) == pytest.approx({"data": 0.01, "student": 0.06, **waits})
    del metrics["phase/bubble_ms"]
    assert phase_seconds(metrics) == pytest.approx({"data": 0.04, "student": 0.06}), "workers that are no stages"


def test_the_point_of_a_row_has_loader_workers_as_they_were_resolved() -> None:
    auto = row(0, grid()[0]) | {"params": {"data.loader_workers": "auto", "precision": "bf16"}}
    assert point_of(typed(auto)) == {**grid()[0], "precision": "bf16"}


def test_what_the_cluster_never_held_is_no_point_of_the_search() -> None:
    rows = [row(n, point, "infeasible" if n else "pending") for n, point in enumerate(grid())]
    assert replay(result(rows)).points == [grid()[0]]


def test_a_row_without_the_times_of_its_steps_counts_as_one_step() -> None:
    old = {key: value for key, value in row(0, grid()[0]).items() if key not in ("steps_s", "start_s", "ended_s")}
    assert observation(typed(old)).steps_s == [step_s(grid()[0])]


def test_a_search_concludes_with_the_best_point_what_it_left_out_and_why() -> None:
    points = grid()
    rows = [row(n, point, "pending") for n, point in enumerate(points)]
    for turn in range(2 * len(points)):
        asked = replay(result(rows)).ask()
        if asked is None:
            break
        measured(rows, points.index(dict(asked)), asked, 1.0 + turn)
    concluded = conclusion(result(rows))
    best = min(points, key=lambda point: step_s(point) / point["data.global_batch_size"])
    assert next(one for one in concluded["trials"] if one.id == concluded["chosen"]).params == best
    assert {one.status for one in concluded["trials"]} == {"ok", "untested"}
    done = [one for one in rows if one["status"] == "ok"]
    assert concluded["search"].spent_gpu_s == sum(10.0 * one["scale"]["scale.num_workers"] for one in done)
    assert concluded["search"].bound_pct < 6
    assert "better than 4 workers, global batch 512, 4 loader workers" in concluded["search"].why


def trained(number: int, point: dict[str, Any], seconds: float | None, ended_s: float) -> dict[str, Any]:
    """The row of a training to the target by the law S = 100·(1 + 200/B), which `seconds` may have cut short."""
    batch = point["data.global_batch_size"]
    whole, pace = 100 * (1 + 200 / batch), step_s(point)
    reached = seconds is None or whole * pace <= seconds
    steps = whole if reached or seconds is None else seconds / pace
    metrics = {"steps": steps, "train_s": steps * pace, "noise_scale": 150.0}
    metrics |= {"steps_to_accuracy": steps, "time_to_accuracy_s": steps * pace} if reached else {}
    trained_row = {"id": f"{number:03d}-trained", "speed_trial": f"{number:03d}", "status": "ok" if reached else "stopped"}
    return row(number, point, ended_s=ended_s) | trained_row | {"metrics": metrics}


def searched_for_time() -> tuple[RunResult, TimeToAccuracySearch]:
    points = grid()
    rows = [row(n, point, ended_s=float(n)) for n, point in enumerate(points)]
    for one, point in zip(rows, points, strict=True):
        one["metrics"]["epoch_s"] = 640 / point["data.global_batch_size"] * step_s(point)
    while True:
        recorded = result(rows, metric="time_to_accuracy", mode="min", noise_scales=[60.0])
        search, ids = time_to_accuracy_search(recorded, replay(recorded))
        if (asked := search.ask()) is None:
            return recorded, search
        number = int(ids[asked])
        rows.append(trained(number, points[number], search.until_s, 100.0 + len(rows)))


def test_the_points_that_may_reach_a_target_first_are_trained_and_the_fastest_wins() -> None:
    recorded, search = searched_for_time()
    followed = [one for one in recorded.rows if one.speed_trial is not None]
    best = min(grid(), key=lambda point: (1 + 200 / point["data.global_batch_size"]) * step_s(point))
    concluded = conclusion(recorded)
    assert 1 <= len(followed) <= search.max_trainings
    assert recorded.best is not None
    assert recorded.best.params == best
    assert recorded.best.speed_trial == recorded.best.id.removesuffix("-trained")
    assert concluded["search"].why == search.why()
    assert len(concluded["search"].predicted_s) == len(grid())


@pytest.mark.processes
def test_trainings_to_a_target_are_no_probes_of_a_planner() -> None:
    recorded, _ = searched_for_time()
    alone = recorded.model_copy(update={"trials": [one for one in recorded.rows if one.speed_trial is None]})
    assert replay(recorded).best() == replay(alone).best()
    assert len(replay(recorded).history) == len(grid())


def test_points_that_broke_or_do_not_fit_are_not_trained() -> None:
    points = grid()
    rows = [row(n, point, "failed" if n % 2 else "ok", ended_s=float(n)) for n, point in enumerate(points)]
    recorded = result(rows, metric="time_to_accuracy", mode="min")
    _, ids = time_to_accuracy_search(recorded, replay(recorded))
    assert ids == [f"{n:03d}" for n in range(0, len(points), 2)]


@pytest.mark.parametrize(("failure", "observed"), [("out_of_memory", "oom"), ("node_out_of_memory", "failed"), (None, "oom")])
def test_a_nodes_memory_says_nothing_of_a_batch(failure: str | None, observed: str) -> None:
    outcome = typed(row(0, grid()[0], "oom") | {"failure": failure}).outcome
    assert observation(outcome).status == observed
