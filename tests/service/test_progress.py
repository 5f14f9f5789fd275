"""What is shown of a stage's files: plain lines in a log, bars on a terminal, each line once."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from service.progress import Display
from trainables.rundir import StageDir, append_line


def test_a_log_gets_each_new_line_once_behind_its_stages_name(tmp_path: Path) -> None:
    stage, out = StageDir(tmp_path), io.StringIO()
    stage.log.parent.mkdir()
    stage.log.write_text("an earlier try's line\n")
    with Display(Console(file=out, width=160)) as display:
        display.follow("student", stage)
        with open(stage.log, "a") as log:
            log.write("Epoch: [1][1/2]\nEpoch: [1][2/")
        display.tick()
        with open(stage.log, "a") as log:
            log.write("2]\n")
        display.tick()
        display.unfollow("student")
    assert out.getvalue().splitlines() == ["[student] Epoch: [1][1/2]", "[student] Epoch: [1][2/2]"]


def test_a_terminal_gets_a_bar_with_speed_and_loss(tmp_path: Path) -> None:
    stage, out = StageDir(tmp_path), io.StringIO()
    with Display(Console(file=out, width=160, force_terminal=True)) as display:
        display.follow("student", stage)
        append_line(stage.metrics, {"kind": "start", "step": 0, "metrics": {"max_steps": 0, "steps_per_epoch": 20, "epochs": 2}})
        append_line(stage.metrics, {"kind": "step", "step": 10, "metrics": {"train/images_per_s": 123.4, "train/loss": 0.5}})
        display.tick()
        display.trials(1, 8)
        assert display._bars is not None
        display._bars.refresh()
    assert "10/40" in out.getvalue()
    assert "123 images/s" in out.getvalue()
    assert "loss 0.500" in out.getvalue()


def test_a_stage_that_is_resumed_still_knows_how_many_steps_there_are(tmp_path: Path) -> None:
    stage, out = StageDir(tmp_path), io.StringIO()
    append_line(stage.metrics, {"kind": "start", "step": 0, "metrics": {"max_steps": 0, "steps_per_epoch": 20, "epochs": 2}})
    with Display(Console(file=out, width=160, force_terminal=True)) as display:
        display.follow("student", stage)
        append_line(stage.metrics, {"kind": "resume", "step": 20, "metrics": {}})
        display.tick()
        assert display._bars is not None
        display._bars.refresh()
    assert "20/40" in out.getvalue()
