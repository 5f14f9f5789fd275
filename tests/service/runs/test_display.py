"""What is shown of a stage's files: plain lines in a log, bars on a terminal, each line once."""

import io
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from service.cluster import local_ray
from service.cluster.local_ray import RayLostError
from service.runs.display import Display, wait_for
from tests.run_log import add, numbers
from trainables.rundir import RunDir, StageDir

START = numbers("start", "student", 0, max_steps=0, steps_per_epoch=20, epochs=2)


def test_a_log_gets_each_new_line_once_behind_its_stages_name(tmp_path: Path) -> None:
    stage, out = StageDir(tmp_path), io.StringIO()
    stage.log.parent.mkdir()
    stage.log.write_text("an earlier try's line\n")
    with Display(Console(file=out, width=160)) as display:
        display.follow("student", "student", stage)
        with open(stage.log, "a") as log:
            log.write("Epoch: [1][1/2]\nEpoch: [1][2/")
        display.tick()
        with open(stage.log, "a") as log:
            log.write("2]\n")
        display.tick()
        display.unfollow("student")
    assert out.getvalue().splitlines() == ["[student] Epoch: [1][1/2]", "[student] Epoch: [1][2/2]"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_that_cannot_be_read_for_a_while_ends_nothing_and_no_line_is_lost_or_shown_twice(tmp_path: Path) -> None:
    """A real input/output error: nothing is mapped at the beginning of a process's memory."""
    stage, out = StageDir(tmp_path), io.StringIO()
    stage.log.parent.mkdir()

    def fail(path: Path) -> None:
        path.with_suffix(".aside").symlink_to("/proc/self/mem")
        path.with_suffix(".aside").replace(path)

    with Display(Console(file=out, width=160)) as display:
        fail(stage.log)
        display.follow("student", "student", stage)
        display.tick()
        stage.log.unlink()
        stage.log.write_text("one\n")
        display.tick()
        stage.log.rename(tmp_path / "log")
        fail(stage.log)
        display.tick()
        (tmp_path / "log").replace(stage.log)
        with open(stage.log, "a") as log:
            log.write("two\n")
        display.unfollow("student")
    assert out.getvalue().splitlines() == ["[student] one", "[student] two"]


def test_control_characters_are_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as display:
        display.print("trial 000: \x1b]0;owned\x07 photo.png")
    assert capsys.readouterr().out == "trial 000: \\x1b]0;owned\\x07 photo.png\n"


def test_lines_of_before_a_resume_are_not_shown_where_their_file_cannot_be_looked_up_at_first(tmp_path: Path) -> None:
    """A real error: a link to itself."""
    stage, out = StageDir(tmp_path), io.StringIO()
    stage.log.parent.mkdir()
    stage.log.symlink_to(stage.log)
    with Display(Console(file=out, width=160)) as display:
        display.follow("student", "student", stage)
        display.tick()
        stage.log.unlink()
        stage.log.write_text("an earlier try's line\n")
        display.tick()
        with open(stage.log, "a") as log:
            log.write("one\n")
        display.unfollow("student")
    assert out.getvalue().splitlines() == ["[student] one"]


def test_a_terminal_gets_a_bar_with_speed_and_loss(tmp_path: Path) -> None:
    stage, out = StageDir(tmp_path), io.StringIO()
    with Display(Console(file=out, width=160, force_terminal=True)) as display:
        display.watch(RunDir(tmp_path).events)
        display.follow("student", "student", stage)
        add(RunDir(tmp_path), START, numbers("step", "student", 10, **{"train/images_per_s": 123.4, "train/loss": 0.5}))
        display.tick()
        display.trials(1, 8, "2 running, about 4 min left")
        assert display._bars is not None
        display._bars.refresh()
    assert "10/40" in out.getvalue()
    assert "123 images/s" in out.getvalue()
    assert "2 running, about 4 min left" in out.getvalue()
    assert "loss 0.500" in out.getvalue()


def test_a_bar_does_not_go_back_where_an_epoch_was_evaluated_while_the_next_one_trained(tmp_path: Path) -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=160, force_terminal=True)) as display:
        display.watch(RunDir(tmp_path).events)
        display.follow("student", "student", StageDir(tmp_path))
        add(RunDir(tmp_path), START, numbers("step", "student", 30), numbers("epoch", "student", 20, **{"val/top1_pct": 80.0}))
        display.tick()
        assert display._bars is not None
        display._bars.refresh()
    assert "30/40" in out.getvalue()
    assert "val 80.00%" in out.getvalue()
    assert "20/40" not in out.getvalue()


def test_a_stage_that_is_resumed_still_knows_how_many_steps_there_are(tmp_path: Path) -> None:
    out = io.StringIO()
    add(RunDir(tmp_path), START)
    with Display(Console(file=out, width=160, force_terminal=True)) as display:
        display.watch(RunDir(tmp_path).events)
        display.follow("student", "student", StageDir(tmp_path), [START])
        add(RunDir(tmp_path), numbers("resume", "student", 20))
        display.tick()
        assert display._bars is not None
        display._bars.refresh()
    assert "20/40" in out.getvalue()


def test_a_ray_of_our_own_that_is_killed_is_noticed_at_once_whatever_the_work_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    with subprocess.Popen(["sleep", "600"]) as raylet:
        monkeypatch.setattr(local_ray, "_servers", {"raylet": psutil.Process(raylet.pid)})
        threading.Timer(0.5, raylet.kill).start()
        with pytest.raises(RayLostError, match="its process raylet was killed"):
            wait_for(release.wait, Display(Console(file=io.StringIO())))
        assert local_ray.in_use()  # it is not shut down, which would wait for it
    release.set()
