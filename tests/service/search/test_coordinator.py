"""Groups of workers that measure a sweep's points, with a formula in place of the workers."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from service.cluster.resources import Cluster, Node
from service.config.experiment import load
from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.run_log import ResultFold, as_json, read_log
from service.runs.stages.assignment import Assignment
from service.search.coordinator import PointCoordinator
from service.sweeps.trials import plan_trials
from service.sweeps.tune import with_shared_reservations
from tests.run_log import LocalRecorder, events_of
from tests.service.search.rows import AXES, result, row, stage
from trainables.rundir import RunDir
from trainables.stage_result import StageResult

SPACE = "sweep.space={scale.num_workers: [1, 2, 4], data.global_batch_size: [64, 128, 256, 512], data.loader_workers: [1, 4]}"
ROOM = Cluster((Node("a", 32, 0),))


def log_of(folder: Path) -> ResultFold:
    return read_log(RunDir(folder)).fold


def outcome_of(folder: Path, trial: str) -> Outcome:
    outcome = log_of(folder).outcome_of(trial)
    assert outcome is not None
    return outcome


def ended(folder: Path) -> list[Outcome]:
    """How each trial that has ended did."""
    trials = (f"{number:03d}" for number in range(100))
    return [outcome for trial in trials if (outcome := log_of(folder).outcome_of(trial)) is not None]


def points_of(run_dir: RunDir, rows: dict[str, dict[str, Any]], space: str, recorder: LocalRecorder) -> dict[str, Assignment]:
    """An assignment a point of the sweep; fills `rows` with them as they stand."""
    left, fold = {}, log_of(run_dir.root)
    for number, trial in enumerate(plan_trials(load("digits", [space, "sweep.policy=guided"]))):
        assert trial.resolved is not None
        point = scale(trial.resolved.experiment.model_dump(mode="json")) | trial.params
        rows[trial.id] = row(number, point, "pending")
        if (outcome := fold.outcome_of(trial.id)) is not None:
            rows[trial.id] |= as_json(outcome)
        planned = Plan.on(trial.resolved.experiment, ROOM).assign("student", run_dir.trial(trial.id), {})
        left[trial.id] = planned.recorded_by(recorder)
    return with_shared_reservations(left)


def begun(folder: Path, space: str = SPACE, recorder: LocalRecorder | None = None) -> PointCoordinator:
    rows: dict[str, dict[str, Any]] = {}
    left = points_of(RunDir(folder), rows, space, recorder or LocalRecorder(folder))
    return PointCoordinator(left, str(folder), result(list(rows.values())))


def scale(config: dict[str, Any]) -> dict[str, Any]:
    """The three axes of a `TrainConfig` as plain data."""
    return {
        AXES[0]: config["scale"]["num_workers"],
        AXES[1]: config["data"]["global_batch_size"],
        AXES[2]: config["data"]["loader_workers"],
    }


def drive(coordinator: PointCoordinator, limit: int = 100) -> list[list[dict[str, Any]]]:
    """Run worker groups one after the other to the end, or until `limit` points were measured: the points of each."""
    done: list[list[dict[str, Any]]] = []
    count = 0
    while count < limit and coordinator.suggest(name := f"v{len(done)}") is not None:
        done.append([])
        config: dict[str, Any] | None = coordinator.start(name).config.model_dump(mode="json")
        while config is not None:
            done[-1].append(scale(config))
            count += 1
            if count == limit:
                return done
            config = coordinator.next_config(name, StageResult(**stage(done[-1][-1])))
    return done


def test_a_group_of_workers_goes_on_to_points_with_as_many_workers_and_then_makes_room(tmp_path: Path) -> None:
    coordinator = begun(tmp_path)
    done = drive(coordinator)
    assert all(len({point[AXES[0]] for point in group}) == 1 for group in done)
    measured = [point for group in done for point in group]
    assert len(done) < len({tuple(point.values()) for point in measured}) < 24
    assert coordinator.is_idle()


def test_each_point_has_a_result_and_only_the_first_of_a_group_a_start(tmp_path: Path) -> None:
    done = drive(begun(tmp_path))
    outcomes = ended(tmp_path)
    assert len(outcomes) == len({tuple(point.values()) for group in done for point in group})
    each = [one for whole in outcomes for one in whole.each_measurement]
    assert len(each) == sum(map(len, done))
    assert all(one.status == "ok" and len(one.steps_s) == 12 and one.ended_s > 0 for one in each)
    assert sum(one.start_s == 0.0 for one in each) == len(each) - len(done)


def trial_at(work: Assignment) -> str:
    return Path(work.config.output_dir).parent.name


def test_a_point_that_is_measured_again_has_each_measurement_in_a_folder_of_its_own(tmp_path: Path) -> None:
    coordinator, done, number = begun(tmp_path), list[tuple[str, str]](), 0
    while coordinator.suggest(name := f"v{number}") is not None:
        number += 1
        work: Assignment | None = coordinator.start(name)
        while work is not None:
            done.append((trial_at(work), Path(work.config.output_dir).name))
            coordinator.next_config(name, StageResult(**stage(scale(work.config.model_dump(mode="json")))))
            work = coordinator.current(name)
    assert len(set(done)) == len(done)
    again = {trial: [folder for one, folder in done if one == trial] for trial, _ in done}
    twice = next(trial for trial, folders in again.items() if len(folders) > 1)
    written = outcome_of(tmp_path, twice)
    assert again[twice][:2] == ["student", "student-2"]
    assert len(written.measurements) == len(again[twice])
    assert len(written.steps_s) == 12 * len(again[twice])
    assert written.seconds == sum(one.seconds for one in written.measurements)


def test_a_measurement_that_fails_leaves_those_before_it_as_they_were(tmp_path: Path) -> None:
    coordinator, number = begun(tmp_path), 0
    while coordinator.suggest(name := f"v{number}") is not None:
        number += 1
        work: Assignment | None = coordinator.start(name)
        while work is not None:
            if (earlier := log_of(tmp_path).outcome_of(trial_at(work))) is not None:
                coordinator.finish(name, Outcome(status="failed", reason="its reason"))
                now = outcome_of(tmp_path, trial_at(work))
                assert (now.status, now.reason, now.metrics) == ("ok", "", earlier.metrics)
                assert [one.status for one in now.measurements] == ["ok", "failed"]
                return
            coordinator.next_config(name, StageResult(**stage(scale(work.config.model_dump(mode="json")))))
            work = coordinator.current(name)
    raise AssertionError("no point was measured again")


def test_a_search_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = [point for group in drive(begun(tmp_path / "whole")) for point in group]
    killed = LocalRecorder(tmp_path / "killed")
    drive(begun(tmp_path / "killed", recorder=killed), limit=4)  # the fourth is under way when it dies
    killed.actor.close()
    before = len(ended(tmp_path / "killed"))
    after = [point for group in drive(begun(tmp_path / "killed")) for point in group]
    assert before == 3
    assert after[0] not in whole[:before]  # what was finished is not begun with again
    assert after[-1] in whole
    assert abs(before + len(after) - len(whole)) <= 3  # the group that died had its start paid, the new one has not


def test_a_point_that_fails_ends_its_group_and_another_is_asked_for_next(tmp_path: Path) -> None:
    coordinator = begun(tmp_path)
    first = coordinator.suggest("a")
    assert first is not None
    coordinator.start("a")
    coordinator.finish("a", Outcome(status="failed", reason="its reason"))
    written = outcome_of(tmp_path, first)
    assert (written.status, written.reason) == ("failed", "its reason")
    assert coordinator.is_idle()
    coordinator.finish("a", Outcome(status="failed", reason="said twice"))
    assert outcome_of(tmp_path, first) == written
    assert coordinator.suggest("b") not in (None, first)


def test_a_group_that_dies_before_it_begins_ends_no_earlier_measurement(tmp_path: Path) -> None:
    recorder = LocalRecorder(tmp_path)
    coordinator = begun(tmp_path, recorder=recorder)
    trial = coordinator.suggest("a")
    assert trial is not None
    recorder.record([event("trial_ended", trial=trial, outcome={"status": "ok"})])
    coordinator.finish("a", Outcome(status="failed", reason="its reason"))
    folder = RunDir(tmp_path).trial(trial).root
    assert [len(events_of(folder / name, "stage_begun")) for name in ("student", "student-2")] == [0, 1]
    assert [each.status for each in outcome_of(tmp_path, trial).measurements] == ["ok", "failed"]


def test_two_groups_at_a_time_never_measure_the_same_point(tmp_path: Path) -> None:
    coordinator = begun(tmp_path)
    under_way = [coordinator.suggest("a"), coordinator.suggest("b"), coordinator.suggest("c")]
    assert None not in under_way
    assert len(set(under_way)) == 3
    assert not coordinator.is_idle()


def test_a_search_is_not_over_while_a_point_waits_for_another_group(tmp_path: Path) -> None:
    coordinator = begun(tmp_path)
    workers = None
    for number in range(24):
        first = coordinator.suggest(f"v{number}")
        if first is None:
            break
        config: dict[str, Any] | None = coordinator.start(f"v{number}").config.model_dump(mode="json")
        while config is not None:
            workers = scale(config)[AXES[0]]
            config = coordinator.next_config(f"v{number}", StageResult(**stage(scale(config))))
        waiting = coordinator.current(f"v{number}") is None and not coordinator.is_idle()
        after = coordinator.suggest("next")
        assert waiting is (after is not None)
        if after is None:
            break
        coordinator.finish("next", Outcome(status="failed", reason="its reason"))
    assert workers is not None


def test_workers_measure_only_points_for_which_they_reserved_the_cpus(tmp_path: Path) -> None:
    axes = "scale.cpus_per_worker: [1, 4], data.global_batch_size: [64, 128, 256], data.loader_workers: [2]"
    space = f"sweep.space={{{axes}}}"
    coordinator, groups = begun(tmp_path, space), list[list[int]]()
    while coordinator.suggest(name := f"v{len(groups)}") is not None:
        groups.append([])
        config: dict[str, Any] | None = coordinator.start(name).config.model_dump(mode="json")
        while config is not None:
            groups[-1].append(config["scale"]["cpus_per_worker"])
            config = coordinator.next_config(name, StageResult(**stage(scale(config))))
    assert all(len(set(group)) == 1 for group in groups)
    assert {group[0] for group in groups} == {1, 4}


def test_points_share_the_loader_workers_of_the_hungriest_where_they_reserve_the_same_otherwise(tmp_path: Path) -> None:
    space = "sweep.space={scale.cpus_per_worker: [1, 4], data.loader_workers: [1, 2]}"
    assignments = points_of(RunDir(tmp_path), {}, space, LocalRecorder(tmp_path))
    own = {trial: replace(one, loader_workers=int(one.config.data.loader_workers)) for trial, one in assignments.items()}
    del own["003"]  # of 4 CPUs and 2 loader workers
    shared = [(one.config.scale.cpus_per_worker, one.loader_workers) for one in with_shared_reservations(own).values()]
    assert shared == [(1, 2), (1, 2), (4, 1)]


def test_a_measurement_that_cannot_be_written_is_taken_up_once_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = begun(tmp_path)
    trial = coordinator.suggest("a")
    assert trial is not None
    work = coordinator.start("a")
    brought = StageResult(**stage(scale(work.config.model_dump(mode="json"))))
    work.log.send("summary", work.stage_dir.root, step=12, epoch=1.0, **brought.model_dump())()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(28, "the disk is full")))
        with pytest.raises(OSError, match="the disk is full"):
            coordinator.next_config("a", brought)
    assert coordinator.current("a") == work, "it is still under way"
    assert log_of(tmp_path).outcome_of(trial) is None
    coordinator.finish("a", Outcome(status="failed", reason="a worker died: of the full disk"))
    written = outcome_of(tmp_path, trial)
    assert (written.status, written.reason, written.measurements) == ("ok", "", [])
    assert coordinator.is_idle()
    coordinator.finish("a", Outcome(status="failed", reason="it has ended"))
    assert outcome_of(tmp_path, trial) == written


def test_a_measurement_whose_workers_died_has_its_restarts_and_the_start_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = "sweep.space={data.global_batch_size: [64, 96, 128, 192, 256, 384, 512], data.loader_workers: [1, 2, 3, 4, 6, 8]}"
    coordinator, clock_s = begun(tmp_path, space), [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock_s[0])
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * clock_s[0]))
    assert coordinator.suggest("a") is not None
    first = coordinator.start("a")
    record_start(first, clock_s[0] + 8.0)
    clock_s[0] += 20.0
    config = coordinator.next_config("a", StageResult(**stage(scale(first.config.model_dump(mode="json")))))
    assert config is not None
    second = coordinator.current("a")
    assert second is not None
    record_start(second, clock_s[0] + 1.0)
    clock_s[0] += 5.0
    assert coordinator.restart("a", 1) == 5.0, "what it has used of its time"
    record_start(second, clock_s[0] + 30.0)
    clock_s[0] += 40.0
    coordinator.next_config("a", StageResult(**stage(scale(config))))
    outcomes = [outcome_of(tmp_path, trial_at(work)) for work in (first, second)]
    assert [(one.restarts, one.start_s, one.seconds) for one in outcomes] == [(0, 8.0, 20.0), (1, 30.0, 45.0)]


def record_start(work: Assignment, at_s: float) -> None:
    """As the loop of a job does when it begins."""
    start = event("start", work.name, step=0, epoch=0.0, metrics={})
    work.log.record([start | {"time_ms": int(1e3 * at_s)}])


def test_a_group_goes_on_to_a_point_that_waits_for_such_workers_before_the_planner_proposes(tmp_path: Path) -> None:
    axes = "scale.cpus_per_worker: [1, 4], data.global_batch_size: [64, 128, 256], data.loader_workers: [1, 2, 4]"
    coordinator, configs = begun(tmp_path, f"sweep.space={{{axes}}}"), dict[str, dict[str, Any]]()  # of two groups
    for number in range(100):
        while len(configs) < 2 and coordinator.suggest(name := f"v{number}-{len(configs)}") is not None:
            configs[name] = coordinator.start(name).config.model_dump(mode="json")
        for name, config in list(configs.items()):
            cpus = config["scale"]["cpus_per_worker"]
            reserved = {trial: one.config.scale.cpus_per_worker for trial, one in coordinator._assignments.items()}
            waiting = [trial for trial in coordinator._queued if reserved[trial] == cpus]
            following = coordinator.next_config(name, StageResult(**stage(scale(config))))
            if waiting:
                assert coordinator._trial_of[name] == waiting[0]
                assert waiting[0] not in coordinator._queued
                return
            configs.pop(name)
            if following is not None:
                configs[name] = following
    raise AssertionError("no point waited for a group that was there")


def listed(folder: Path, space: str, limit_s: float | None = None) -> PointCoordinator:
    """The points of a grid."""
    left = points_of(RunDir(folder), {}, space, LocalRecorder(folder))
    return PointCoordinator({trial: replace(one, limit_s=limit_s) for trial, one in left.items()}, str(folder))


def test_each_point_of_a_grid_is_measured_once_those_of_equal_workers_by_one_group(tmp_path: Path) -> None:
    done = drive(listed(tmp_path, "sweep.space={data.global_batch_size: [64, 128], scale.num_workers: [1, 2]}"))
    assert [[(point[AXES[0]], point[AXES[1]]) for point in group] for group in done] == [[(1, 64), (1, 128)], [(2, 64), (2, 128)]]
    assert [(one.status, one.start_s == 0, one.measurements) for one in ended(tmp_path)] == [
        ("ok", number > 1, []) for number in range(4)
    ]


def test_a_point_of_a_grid_that_ends_its_group_is_a_row_and_the_next_group_goes_on_with_the_rest(tmp_path: Path) -> None:
    coordinator = listed(tmp_path, "sweep.space={data.global_batch_size: [64, 128, 256]}")
    assert coordinator.suggest("a") == "000"
    coordinator.start("a")
    coordinator.finish("a", Outcome(status="oom", reason="its reason"))
    done = drive(coordinator)
    assert [[point[AXES[1]] for point in group] for group in done] == [[128, 256]]
    assert [one.status for one in ended(tmp_path)] == ["oom", "ok", "ok"]


def test_workers_that_have_what_was_left_of_a_points_time_measure_no_other(tmp_path: Path) -> None:
    coordinator = listed(tmp_path, "sweep.space={data.global_batch_size: [64, 128, 256]}", limit_s=60.0)
    assert coordinator.suggest("a") is not None
    config: dict[str, Any] | None = coordinator.start("a").config.model_dump(mode="json")
    assert config is not None
    config = coordinator.next_config("a", StageResult(**stage(scale(config))))
    assert config is not None
    coordinator.restart("a", 1)
    assert coordinator.next_config("a", StageResult(**stage(scale(config)))) is None
    assert [[point[AXES[1]] for point in group] for group in drive(coordinator)] == [[256]]


def test_a_point_of_a_grid_that_waited_for_nodes_in_vain_refuses_those_that_need_as_much(tmp_path: Path) -> None:
    coordinator = listed(tmp_path, "sweep.space={scale.num_workers: [2, 1, 4], data.loader_workers: [1]}")
    assert coordinator.suggest("a") == "000"
    coordinator.start("a")
    coordinator.finish("a", Outcome(status="failed", failure="unschedulable", reason="2 workers do not fit"))
    assert [[point[AXES[0]] for point in group] for group in drive(coordinator)] == [[1]]
    refused = outcome_of(tmp_path, "002")
    assert (refused.status, refused.failure) == ("failed", "unschedulable")
    assert refused.reason == "it needs as much as trial 000, and 2 workers do not fit"
