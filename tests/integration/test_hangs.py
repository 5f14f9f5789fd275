"""Workers that hang on a real Ray: noticed, explained and begun again, or ended."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from service.report.records import hang_lines
from service.runs.run_log import read_log
from tests.integration.conftest import Distill, records, result, wait_until
from tests.trainables.data.photos import photo
from trainables.rundir import RunDir, StageDir

pytestmark = [pytest.mark.integration, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

METHOD = """\
import ctypes, os, time

import torch.distributed as dist

from trainables.config import MethodOptions
from trainables.data.pack import layout_reader
from trainables.engine import checkpoint_writer
from trainables.methods.contract import Method, Requirements


MUTEX = ctypes.create_string_buffer(64)


class Hangs(Method):
    Options = MethodOptions
    terms = ("none",)
    requires = Requirements(teacher=False)
    calls = 0

    def forward(self, student, teacher, batch):
        self.calls += 1
        if {condition}:
            {action}
        return {{"none": 0 * student.logits_BK.sum(1)}}
"""
HANG_AFTER_S = 6
TWO = ("--set", "scale.num_workers=2")


def hanging(distill: Distill, action: str, condition: str = "dist.get_rank() == 1 and self.calls == 12") -> tuple[str, ...]:
    """Settings of an experiment with a method that does something at some step; each epoch has 22."""
    (distill.folder / "hangs.py").write_text(METHOD.format(action=action, condition=condition))
    sets = {
        "distill": f"{{method: {distill.folder}/hangs.py:Hangs, task_weight: 1.0}}",
        "scale.hang_after_s": HANG_AFTER_S,
        "train.checkpoint_every": 5,
        "train.log_every": 1,
    }
    return tuple(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))


def stage_of(run: Path) -> StageDir:
    return RunDir(run).stage("student")


def test_a_rank_that_sleeps_in_a_method_is_named_with_its_line_and_with_what_the_others_wait_for(distill: Distill) -> None:
    run, sets = distill.runs / "sleeps", hanging(distill, "time.sleep(10_000)")
    output = distill.run("train", distill.experiment, "--out", run, *TWO, *sets, "--set", "scale.max_failures=0", code=2)
    expected = (
        r"rank 1 of 2 hangs in student of step 12 \(hangs-\w+\.py:\d+ in forward\); rank 0 waits for it in gloo:all_reduce \d+"
    )
    assert re.search(expected, output.splitlines()[-1]), output
    found = result(run)["stages"][0]
    assert (found["status"], found["failure"]) == ("failed", "hang")
    (hang,) = records(run, "hang")
    assert "rank 1 of 2 hangs in student of step 12" in hang["message"]
    seconds = re.search(r"no progress for (\d+) s", hang["message"])
    assert seconds is not None
    assert HANG_AFTER_S <= int(seconds[1]) <= HANG_AFTER_S + 15
    stacks = stage_of(run).stacks.read_text()
    assert stacks.count("in train_epoch") >= 2  # both ranks' training threads
    assert "in forward" in stacks
    assert re.search(expected, RunDir(run).report.read_text())


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_ended_and_begun_again(distill: Distill) -> None:
    run = distill.runs / "stopped"
    sets = hanging(distill, "time.sleep(0.05)", "True")
    command = distill.start("train", distill.experiment, "--out", run, *TWO, *sets)
    wait_until(lambda: "[8/22]" in command.output, "step 8", command)
    stopped = command.workers()[0]
    os.kill(stopped.pid, signal.SIGSTOP)
    assert command.end() == 0, command.output
    why = r"does not answer \(its process is stopped\), and last answered in .*; rank"
    assert re.search(rf"rank [01] of 2 on 127\.0\.0\.1 {why}", command.output)
    assert not stopped.is_running()
    found = result(run)["stages"][0]
    assert (found["status"], found["restarts"]) == ("ok", 1)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_get_written_is_named(distill: Distill) -> None:
    run, pipe = distill.runs / "disk", distill.folder / "pipe"
    os.mkfifo(pipe)  # to be opened for writing it needs a reader, which does not come
    action = f"checkpoint_writer.write_packed = lambda *_, **__: open({str(pipe)!r}, 'wb')"
    sets = hanging(distill, action, "self.calls == 3")
    output = distill.run("train", distill.experiment, "--out", run, *TWO, *sets, "--set", "scale.max_failures=0", code=2)
    # That of step 5 is on its way for ever, and the next one waits for it.
    where = r"in checkpoint after step 10 \(\w+\.py:\d+ in \w+\)"
    assert re.search(rf"rank 0 of 2 hangs {where}; rank 1 waits for it", output), output
    assert re.search(r"checkpoint_writer\.py\", line \d+ in _write", stage_of(run).stacks.read_text())


@pytest.mark.slow
def test_an_image_whose_read_does_not_return_is_in_the_stacks(distill: Distill) -> None:
    images = distill.folder / "images"
    for split in ("train", "val"):
        for number in range(64):
            folder = images / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            photo(number).save(folder / f"{number:03d}.jpg")
    # A dead network file system: files that cannot be waited for, such as pipes, are skipped.
    sets = hanging(distill, "layout_reader.read_file = lambda path: time.sleep(10_000)", "self.calls == 12")
    data = ("--set", f"data.path={images}", "--set", "data.global_batch_size=8")
    run = distill.runs / "read"
    output = distill.run("train", distill.experiment, "--out", run, *data, *sets, "--set", "scale.max_failures=0", code=2)
    assert re.search(r"rank 0 of 1 hangs in data of step \d+ \(\w+\.py:\d+ in \w+\)", output), output
    assert "in read" in stage_of(run).stacks.read_text()


@pytest.mark.slow
def test_a_trial_that_takes_too_long_ends_as_failed_and_the_sweep_goes_on(distill: Distill) -> None:
    run = distill.runs / "sweep"
    sets = hanging(distill, "time.sleep(0.5)", "len(batch.labels_B) == 32")
    space = ("--set", "sweep={space: {data.global_batch_size: [32, 64]}, steps: 200, trial_limit_s: 25}")
    distill.run("sweep", distill.experiment, "--out", run, *sets, *space)
    slow, fast = result(run)["trials"]
    assert (slow["status"], slow["failure"], fast["status"]) == ("failed", "time_limit", "ok")
    assert re.search(r"took longer than sweep\.trial_limit_s; it was in \w+ of step \d+", slow["reason"])


@pytest.mark.slow
def test_a_hang_that_comes_again_at_the_same_place_ends_the_stage_and_one_that_does_not_is_outlived(distill: Distill) -> None:
    sets = hanging(distill, "time.sleep(10_000)", "dist.get_rank() == 1 and batch.epoch * 22 > 10.5")
    run = distill.runs / "same"
    output = distill.run("train", distill.experiment, "--out", run, *TWO, *sets, code=2)
    assert "hang: restarting from the last checkpoint (restart 1 of at most 3)" in output
    assert "hung in student of step 12 again: no progress for" in output.splitlines()[-1]
    assert len(hang_lines(read_log(RunDir(run)))) == 2
    once = distill.folder / "once"
    sets = hanging(distill, f"time.sleep(0 if os.path.exists({str(once)!r}) else open({str(once)!r}, 'w').write('x') * 10_000)")
    run = distill.runs / "once"
    distill.run("train", distill.experiment, "--out", run, *TWO, *sets)
    found = result(run)["stages"][0]
    assert (found["status"], found["restarts"], found["metrics"]["steps"]) == ("ok", 1, 44)
    assert "rank 1 of 2 hangs in student of step 12" in distill.run("report", run)


@pytest.mark.slow
def test_a_worker_that_does_not_let_go_of_the_interpreter_shows_its_stack_too(distill: Distill) -> None:
    run = distill.runs / "interpreter"
    lock_twice = "[ctypes.PyDLL(None).pthread_mutex_lock(MUTEX) for _ in range(2)]"  # it waits for itself
    sets = hanging(distill, lock_twice, "time.sleep(0.5) or self.calls == 12")
    output = distill.run("train", distill.experiment, "--out", run, *sets, "--set", "scale.max_failures=0", code=2)
    # The step is that of its last answer, the stack that of now.
    assert re.search(r"rank 0 of 1 hangs in \w+ of step \d+ \(hangs-\w+\.py:\d+ in [\w<>]+\)", output), output
