"""The log of a run: durable, each event once, one writer at a time."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.runs import event_log
from service.runs.event_log import EventLog, StaleAttemptError
from service.runs.events import Event, EventTail, event
from service.runs.recorder import Recorder
from service.runs.run_log import RunLog
from tests.run_log import add
from trainables.errors import ExperimentError
from trainables.rundir import RunDir, lines_after


def step(number: int, stage: str = "student", kind: str = "step", **metrics: float) -> Event:
    return event(kind, stage, step=number, epoch=0.0, metrics=metrics)


def kinds(path: Path) -> list[tuple[str, Any]]:
    return [(line["kind"], line.get("step")) for each in lines_after(path, 0) if (line := each.record)]


def test_each_event_of_a_stage_counts_once_also_after_the_log_was_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append([step(0, kind="start", epochs=2), step(10), step(10, stage="teacher")])
    log.append([step(10), step(20)])
    log.close()
    log = EventLog(path)
    log.append([step(10, kind="start", epochs=2), step(20), step(30), step(30, kind="epoch")])
    assert kinds(path) == [
        ("log", None),
        *[("start", 0), ("step", 10), ("step", 10), ("step", 20)],
        *[("resume", 10), ("step", 30), ("epoch", 30)],
    ]
    assert [each["step"] for each in log.of("student")] == [0, 10, 20, 10, 30, 30]
    assert [each["step"] for each in log.of("teacher")] == [10]


def test_a_call_that_comes_again_because_its_answer_was_lost_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    calls = [
        [step(0, kind="start", epochs=2), step(10)],
        [event("restart", "student", failure={}, restarts=1)],
        [step(5, kind="start", epochs=2)],
        [event("discarded", trial="000")],
        [event("trial_ended", trial="000", outcome={"status": "ok", "metrics": {"loss": float("nan")}})],
    ]
    log = EventLog(path)
    for call in calls:
        log.append(call)
        log.append(call)
        log.close()
        log = EventLog(path)  # as the recorder's next process
        log.append(call)
    expected = [("log", None), ("start", 0), ("step", 10), ("restart", None), ("resume", 5), ("discarded", None)]
    assert kinds(path) == [*expected, ("trial_ended", None)]


def test_an_event_that_json_does_not_take_is_refused_alone(tmp_path: Path) -> None:
    async def use(recorder: Recorder) -> None:
        good, bad = recorder.append([step(1)]), recorder.append([step(2), step(3, metric={1, 2})])  # type: ignore[arg-type]
        first, second = await asyncio.gather(good, bad, return_exceptions=True)
        assert first is None
        assert isinstance(second, TypeError)
        await recorder.append([step(2)])

    path = tmp_path / "events.jsonl"
    asyncio.run(use(Recorder(str(path))))
    assert kinds(path) == [("log", None), ("step", 1), ("step", 2)]


def test_a_line_with_a_files_name_that_is_no_utf_8_ends_nothing(tmp_path: Path) -> None:
    async def use(recorder: Recorder) -> None:
        await recorder.append([step(1)], None, [("student/logs/train.log", "caf\udce9.jpg is damaged\n")])

    asyncio.run(use(Recorder(str(tmp_path / "events.jsonl"))))
    assert (tmp_path / "student" / "logs" / "train.log").read_text() == "caf\\udce9.jpg is damaged\n"


def test_what_is_read_is_what_came_before_also_while_a_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    async def use(recorder: Recorder) -> None:
        await recorder.append([step(1)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            refused = asyncio.gather(*(recorder.append([step(number)]) for number in (2, 3)), return_exceptions=True)
            assert [each["step"] for each in await recorder.of("student")] == [1]
            for refusal in await refused:
                assert isinstance(refusal, OSError)
                assert refusal.filename == str(path)

    path = tmp_path / "events.jsonl"
    asyncio.run(use(Recorder(str(path))))


def test_a_discarded_stage_begins_again_and_a_discarded_trial_has_not_ended(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append([step(1, "trials/000/student"), event("trial_ended", trial="000", outcome={"status": "failed"})])
    assert [each["kind"] for each in log.of("trials/000")] == ["trial_ended"]
    log.append([event("discarded", "trials/000/student"), event("discarded", trial="000")])
    assert log.of("trials/000") == log.of("trials/000/student") == []
    log.append([step(1, "trials/000/student")])
    assert len(log.of("trials/000/student")) == 1


def test_a_trial_that_two_others_refuse_at_once_has_ended_once(tmp_path: Path) -> None:
    def ended(**about: str) -> Event:
        return event("trial_ended", trial="002", outcome={"status": "failed"}, **about)

    log = EventLog(tmp_path / "events.jsonl")
    log.append([ended(refused_with="000")])
    log.append([ended(refused_with="001")])
    assert [each["refused_with"] for each in log.of("trials/002")] == ["000"]
    log.append([ended(group="a"), ended(group="b")])  # as measured twice
    assert len(log.of("trials/002")) == 3
    log.append([event("discarded", trial="002"), ended(refused_with="001")])
    assert [each["refused_with"] for each in log.of("trials/002")] == ["001"]


def test_a_line_that_a_death_cut_off_is_lost_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append([step(1)])
    log.close()
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"kind": "step", "stage": "student", "st')
    log = EventLog(path)
    log.append([step(2)])
    assert [each["step"] for each in log.of("student")] == [1, 2]
    assert [found.get("step") for found in EventTail(path).new()] == [None, 1, 2]


def test_a_line_that_lacks_its_end_alone_counts_and_does_not_come_twice(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append([step(1), step(2)])
    log.close()
    os.truncate(path, path.stat().st_size - 1)
    log = EventLog(path)
    assert [each["step"] for each in log.of("student")] == [1, 2]
    log.append([step(2), step(3)])
    assert [each["step"] for each in log.of("student")] == [1, 2, 3]
    log.close()
    assert [each["step"] for each in EventLog(path).of("student")] == [1, 2, 3]


def test_a_reader_skips_unknown_kinds_and_names_a_malformed_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    lines = [{"kind": "later", "time_ms": 1}, {"kind": "step", "stage": 3, "time_ms": 1}, step(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tail = EventTail(path)
    assert [found["step"] for found in tail.new()] == [5]
    assert "step.stage must be str, not 3" in caplog.text
    assert list(tail.new()) == []
    assert tail.offset == path.stat().st_size


@pytest.mark.parametrize("opened", [EventLog, RunLog])
def test_a_long_log_is_opened_a_part_at_a_time(tmp_path: Path, opened: Callable[[Path], object]) -> None:
    add(RunDir(tmp_path), *(event("session_begun", tags={"commit": 100_000 * "0"}) for _ in range(100)))
    tracemalloc.start()
    opened(tmp_path / "events.jsonl")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 5e6


def test_a_tail_that_has_seen_what_a_failed_write_took_back_gives_no_event_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append([step(1)])
    durable, tail = log.size, EventTail(log.path)
    log.append([step(2)])
    assert [each.get("step") for each in tail.new()] == [None, 1, 2]
    os.truncate(log.path, durable)
    assert list(tail.new()) == []
    log.close()
    log = EventLog(log.path)
    log.append([step(2), step(3)])  # comes again
    assert [each["step"] for each in tail.new()] == [3]


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    with pytest.raises(ExperimentError, match=re.escape(f"kill the process that `fuser {path}` lists")):
        EventLog(path, wait_s=0.05)
    log.close()
    EventLog(path, wait_s=0.05).close()


def test_a_log_of_another_format_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "log", "time_ms": 1, "version": 7}\n')
    with pytest.raises(ExperimentError, match="has format 7, and this version reads 1: start a new run"):
        EventLog(path)


def test_a_write_that_fails_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append([step(1)])
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            log.append([step(2)])
    assert path.read_bytes() == before
    log.append([step(2)])
    assert [each["step"] for each in log.of("student")] == [1, 2]


def test_a_log_that_cannot_be_read_back_after_a_failed_write_is_read_before_it_takes_or_gives_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise OSError(5, "Input/output error")

    log = EventLog(tmp_path / "events.jsonl")
    log.append([event("attempt", "student", attempt=2), step(1)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        patch.setattr(event_log, "lines_after", broken)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                log.append([step(2)])
        with pytest.raises(OSError, match="Input/output"):
            log.of("student")
    with pytest.raises(StaleAttemptError):
        log.append([step(3)], 1)
    log.append([step(1), step(2)], 2)
    assert [each.get("step") for each in log.of("student")] == [None, 1, 2]


def test_events_of_workers_that_were_given_up_are_refused(tmp_path: Path) -> None:
    async def use(recorder: Recorder) -> None:
        first = await recorder.begin_attempt("student")
        await recorder.append([step(1)], first)
        second = await recorder.begin_attempt("student")
        with pytest.raises(StaleAttemptError, match=f"attempt {first} at student was abandoned"):
            await recorder.append([step(2)], first)
        await recorder.append([step(2)], second)

    path = tmp_path / "events.jsonl"
    asyncio.run(use(Recorder(str(path))))
    assert [each for each in kinds(path) if each[0] == "step"] == [("step", 1), ("step", 2)]


def test_what_waits_together_is_written_together_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = 0
    fsync = os.fsync

    def count(descriptor: int) -> None:
        nonlocal synced
        synced += 1
        fsync(descriptor)

    async def use(recorder: Recorder) -> None:
        await asyncio.gather(*(recorder.append([step(number)]) for number in range(100)))
        await recorder.append([], None, [("student/logs/train.log", "a line\n")])

    path = tmp_path / "events.jsonl"
    recorder = Recorder(str(path))
    monkeypatch.setattr(os, "fsync", count)
    asyncio.run(use(recorder))
    assert [number for kind, number in kinds(path) if kind == "step"] == list(range(100))
    assert synced <= 2
    assert (tmp_path / "student" / "logs" / "train.log").read_text() == "a line\n"


WRITER = """
import sys
from pathlib import Path
from service.runs import event_log
from service.runs.event_log import EventLog
from service.runs.events import event
log = EventLog(Path(sys.argv[1]))
for number in range(1_000_000):
    log.append([event("step", "student", step=number, epoch=0.0, metrics={})])
    print(number, flush=True)
"""


@pytest.mark.processes
def test_each_acknowledged_event_survives_a_kill_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while (acknowledged := int(process.stdout.readline())) < 200:
            pass
        process.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *map(int, process.stdout.read().splitlines())])
    log = EventLog(path)
    found = [each["step"] for each in log.of("student")]
    assert found == list(range(len(found)))
    assert len(found) > acknowledged
    log.append([step(len(found))])
