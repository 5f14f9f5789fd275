"""A heartbeat says where a job is, at a cost that no step notices."""

import sys
import timeit
from pathlib import Path

import psutil
import pytest

from tests.trainables.jobs import config, no_telemetry
from trainables.distributed.group import Group
from trainables.engine.train import build, run_job
from trainables.metrics.heartbeat import Heartbeat, Position, position, watched
from trainables.metrics.phases import PHASES


class NotingHeartbeat(Heartbeat):
    """Notes its position at each sign of progress."""

    def __init__(self, folder: str = "") -> None:
        self.visited = list[Position]()
        super().__init__(folder)
        self.beat()

    def beat(self) -> None:
        super().beat()
        self.visited.append(self.position())


def test_a_job_says_where_it_is_from_its_start_to_its_end(tmp_path: Path) -> None:
    heartbeat, report = NotingHeartbeat(str(tmp_path)), lambda *_, **__: None
    job = build(config(tmp_path, optim={"epochs": 2, "lr": 0.1}), Group(), report, no_telemetry, heartbeat=heartbeat)
    run_job(job)
    job.close()
    steps = job.epochs.steps_per_epoch
    names = [str(each) for each in heartbeat.visited]
    assert names[0] == "start"
    first_step = [name for name in names if name.endswith(" of step 1")]
    assert list(dict.fromkeys(first_step)) == [f"{phase} of step 1" for phase in PHASES]
    assert names[names.index(first_step[-1]) + 1] == "between steps 0 and 1"
    assert f"eval after step {steps}" in names
    assert f"checkpoint after step {2 * steps}" in names
    orders = [each.order for each in heartbeat.visited if each.part in (*PHASES, "eval")]
    assert orders == sorted(orders)
    assert {each.step for each in heartbeat.visited if each.part in PHASES and each.batch_s is None} == {0}
    assert all(each.folder == str(tmp_path) for each in heartbeat.visited)


def test_the_phases_of_each_micro_batch_follow_those_of_the_one_before() -> None:
    heartbeat = NotingHeartbeat()
    heartbeat.begin_step(0)
    for phase in ("data", "h2d", "augment"):
        heartbeat.end_phase(phase)
    for _ in range(2):
        heartbeat.begin_micro_batch()
        for phase in ("teacher", "student", "backward"):
            heartbeat.end_phase(phase)
    places = [(each.micro_batch, each.part) for each in heartbeat.visited[-8:]]
    assert places == [(n, phase) for n in (1, 2) for phase in ("teacher", "student", "backward", "optimizer")]
    orders = [each.order for each in heartbeat.visited]
    assert orders == sorted(orders)


def test_how_long_the_last_batch_took_is_known_once_there_was_one_of_the_same_kind() -> None:
    heartbeat, known = Heartbeat(), list[bool]()
    heartbeat.enter("eval")
    for _ in heartbeat.over(number for number in range(2)):
        known.append(heartbeat.position().batch_s is not None)
    for activity in ("train", "eval"):
        heartbeat.enter(activity)
        known.append(heartbeat.position().batch_s is not None)
    assert known == [False, True, False, True]


def test_a_phase_costs_less_than_two_microseconds() -> None:
    heartbeat = Heartbeat()
    assert min(timeit.repeat(lambda: heartbeat.end_phase("student"), number=10_000, repeat=5)) / 10_000 < 2e-6


def test_what_is_behind_comes_first_whatever_it_is_doing() -> None:
    parts = [
        ("start", 0),
        ("between steps", 5),
        ("eval", 5),
        ("checkpoint", 5),
        ("data", 5),
        ("backward", 5),
        ("data", 6),
        ("timing", 6),
    ]
    in_order = [Position(part, step) for part, step in parts]
    assert sorted(set(in_order), key=lambda each: each.order) == in_order


def test_there_is_a_position_while_a_job_is_watched() -> None:
    assert position() is None
    with watched("/runs/x/student") as heartbeat:
        heartbeat.enter("eval")
        found = position()
        assert found is not None
        assert (found.part, found.folder) == ("eval", "/runs/x/student")
    assert position() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_at_its_start_a_job_goes_on_while_it_reads_and_writes(tmp_path: Path) -> None:
    heartbeat = NotingHeartbeat()
    for activity, num_beats in (("start", 1), ("train", 0)):
        heartbeat.enter(activity)
        heartbeat.position()
        before = len(heartbeat.visited)
        (tmp_path / "file").write_bytes(bytes(2**21))
        heartbeat.position()
        assert len(heartbeat.visited) == before + num_beats


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("error", [psutil.AccessDenied(), PermissionError()])
def test_a_worker_whose_counters_cannot_be_read_has_a_position(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: psutil.Process) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, "io_counters", refuse)
    with watched():
        assert position() is not None
