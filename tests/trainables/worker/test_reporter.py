"""A stage's records: each once, none lost, whatever kills the process and however often it is resumed."""

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray.train

from tests.run_log import LocalRecorder, events_of
from tests.trainables.jobs import config, train_on_record
from trainables.config import TrainConfig
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.rundir import StageDir
from trainables.worker.reporter import Reporter

KILLED = """
import os, signal, sys, time
from pathlib import Path
from tests.trainables.jobs import train_on_record
from tests.trainables.worker.test_reporter import distilling
from service.runs.event_log import EventLog

append = EventLog.append

def append_slowly(log, events, attempt=None):
    time.sleep(0.1)  # a slow disk: events wait in the writer's queue when the checkpoint is renamed
    append(log, events, attempt)

EventLog.append = append_slowly
replace, renamed = os.replace, []

def replace_and_die(source, target):
    replace(source, target)
    if Path(target).name == "last.safetensors":
        renamed.append(target)
        if len(renamed) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace_and_die
train_on_record(distilling(Path(sys.argv[1])))
"""


def distilling(folder: Path, **train_section: Any) -> TrainConfig:
    return config(folder, optim={"epochs": 3, "lr": 0.05}, train=train_section)


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    """The events of a stage that have numbers."""
    return events_of(folder, "start", "resume", "step", "epoch", "summary")


def pairs(lines: list[dict[str, Any]]) -> Counter[tuple[str, int]]:
    """How often each number is on record for a step."""
    return Counter((name, line["step"]) for line in lines for name in line["metrics"])


def learned(line: dict[str, Any]) -> tuple[Any, ...]:
    """What does not depend on how fast a machine is: a record's place, its names, and what the training has learned."""
    numbers = {name: value for name, value in line["metrics"].items() if re.search("loss|top[15]|lr$|kd/", name)}
    names = {name for name in line["metrics"] if not name.startswith("passes/")}  # as many of these as its seconds allow
    return line["kind"], line["step"], line["epoch"], names, numbers


def test_no_name_comes_twice_at_a_step(tmp_path: Path) -> None:
    train_on_record(distilling(tmp_path))
    lines = numbers_of(tmp_path)
    assert {line["kind"] for line in lines} == {"start", "step", "epoch", "summary"}
    assert set(pairs(lines).values()) == {1}
    prefixes = {
        kind: {name.partition("/")[0] for line in lines if line["kind"] == kind for name in line["metrics"]}
        for kind in ("step", "epoch")
    }
    assert prefixes == {"step": {"train"}, "epoch": {"val", "epoch"}}


@pytest.mark.processes
def test_a_kill_between_a_checkpoint_and_its_epochs_record_loses_no_record(tmp_path: Path) -> None:
    train_on_record(distilling(tmp_path / "whole"))
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "killed"], check=False)
    assert ended.returncode == -signal.SIGKILL
    stage = StageDir(tmp_path / "killed")
    assert [line["epoch"] for line in numbers_of(stage.root) if line["kind"] == "epoch"] == [1.0]
    for _ in range(2):  # a second resume finds nothing left to say
        train_on_record(distilling(stage.root))
    lines = numbers_of(stage.root)
    assert Counter(line["kind"] for line in lines) == {"start": 1, "resume": 2, "step": 13, "epoch": 3, "summary": 1}
    assert set(pairs(lines).values()) == {1}
    whole = [learned(line) for line in numbers_of(tmp_path / "whole")]
    assert [learned(line) for line in lines if line["kind"] != "resume"] == whole
    assert [line["metrics"] for line in lines if line["kind"] == "resume"] == [{}, {}]


def test_events_that_cannot_be_written_stop_the_training_instead_of_losing_what_follows(tmp_path: Path) -> None:
    def report_until_it_fails() -> None:
        with DiskWriter() as disk:
            reporter = Reporter(config(tmp_path, teacher=None), LocalRecorder(tmp_path), Group(), disk)
            reporter.report("step", 1, 0.1, {"of_no_kind_json_knows": {1, 2}})  # type: ignore[dict-item]
            deadline = time.monotonic() + 10
            step = 2
            while time.monotonic() < deadline:
                reporter.report("step", step, 0.2, {"other": 1.0})
                step += 1
                time.sleep(0.01)

    with pytest.raises(TypeError, match="not JSON serializable"):
        report_until_it_fails()


def test_the_record_of_an_epoch_is_durable_before_ray_may_end_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, list[float]]] = []

    def report(metrics: dict[str, float]) -> None:
        seen.append((metrics["epoch"], [event["epoch"] for event in events_of(tmp_path, "epoch")]))

    monkeypatch.setattr(ray.train, "report", report)
    settings = config(tmp_path, teacher=None).model_copy(update={"report_each_epoch": True})
    with DiskWriter() as disk:
        reporter = Reporter(settings, LocalRecorder(tmp_path), Group(), disk)
        for epoch in (1, 2):
            reporter.report("epoch", 10 * epoch, float(epoch), {"val/top1_pct": 50.0})
    assert seen == [(1.0, [1.0]), (2.0, [1.0, 2.0])]
