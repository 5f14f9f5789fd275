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

from tests.trainables.jobs import config, train_on_record
from trainables.config import TrainConfig
from trainables.disk_writer import DiskWriter
from trainables.metrics.metrics_file import MetricsFile
from trainables.rundir import StageDir, read_lines

KILLED = """
import os, signal, sys, time
from pathlib import Path
from tests.trainables.jobs import train_on_record
from tests.trainables.metrics.test_metrics_file import distilling
from trainables import disk_writer

append_lines = disk_writer.append_lines

def append_slowly(path, records):
    time.sleep(1)  # a slow disk: records wait in the writer's queue when the checkpoint is renamed
    append_lines(path, records)

disk_writer.append_lines = append_slowly
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
    lines = read_lines(StageDir(tmp_path).metrics)
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
    assert [line["epoch"] for line in read_lines(stage.metrics) if line["kind"] == "epoch"] == [1.0]
    for _ in range(2):  # a second resume finds nothing left to say
        train_on_record(distilling(stage.root))
    lines = read_lines(stage.metrics)
    assert Counter(line["kind"] for line in lines) == {"start": 1, "resume": 2, "step": 13, "epoch": 3, "summary": 1}
    assert set(pairs(lines).values()) == {1}
    whole = [learned(line) for line in read_lines(StageDir(tmp_path / "whole").metrics)]
    assert [learned(line) for line in lines if line["kind"] != "resume"] == whole
    assert [line["metrics"] for line in lines if line["kind"] == "resume"] == [{}, {}]


def test_a_job_that_repeats_steps_records_them_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for loss in (0.5, 0.25):
        with DiskWriter() as disk:
            file = MetricsFile(path, "student", disk)
            file.add("start", 0, 0.0, {"epochs": 2})
            for step in (1, 2, 1):
                file.add("step", step, 0.5, {"train/loss": loss})
    kinds = [(line["kind"], line["step"], line["metrics"]) for line in read_lines(path)]
    assert kinds == [
        ("start", 0, {"epochs": 2}),
        ("step", 1, {"train/loss": 0.5}),
        ("step", 2, {"train/loss": 0.5}),
        ("resume", 0, {}),
    ]


@pytest.mark.parametrize("kind", [TypeError, FileExistsError])
def test_whatever_stops_the_writer_reaches_the_training_thread(tmp_path: Path, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        record_for_long(tmp_path / "stage" / "metrics.jsonl", in_the_way=kind is FileExistsError)


def record_for_long(path: Path, in_the_way: bool) -> None:
    with DiskWriter() as disk:
        file = MetricsFile(path, "student", disk)
        if in_the_way:
            path.parent.touch()  # a file where the folder should be
        wrong: Any = {"loss": 1.0 if in_the_way else object()}
        file.add("step", 1, 0.5, wrong)
        for step in range(2, 60_000):
            time.sleep(0.001)
            file.add("step", step, 0.5, {"loss": 1.0})
        raise AssertionError("a minute without an error")
