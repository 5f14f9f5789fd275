"""`distill report --watch` follows a run until it ends."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from service.report.terminal import rows_on_screen
from service.runs.events import EventTail
from service.runs.run_directory import abandoned
from tests.run_log import add
from tests.service.commands import run
from tests.service.report.parsed import Parsed
from tests.service.report.runs import sweep_dir, typed, typed_row
from tests.waiting import wait_until
from trainables.rundir import RunDir

SPACE = {"data.global_batch_size": [64, 128, 256, 512]}
PENDING = {"status": "pending", "metrics": {}, "steps_s": []}


def running(root: Path) -> RunDir:
    return sweep_dir(root, SPACE, status="running", ends={"003": PENDING})


def test_it_renews_the_page_until_the_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = running(tmp_path / "s")
    ended = sweep_dir(tmp_path / "later", SPACE)
    shown_results = []

    def end() -> None:
        until = time.monotonic() + 60
        while not run_dir.report.exists() and time.monotonic() < until:
            time.sleep(0.05)
        shown_results.append(run_dir.report.read_text() if run_dir.report.exists() else "no page")
        add(run_dir, *(found for found in EventTail(ended.events).new() if found["kind"] == "result"))

    thread = threading.Thread(target=end)
    thread.start()
    code, out, _ = run(capsys, "report", run_dir.root, "--watch")
    thread.join()
    assert code == 0
    assert out.startswith("sweep demo in ")
    assert "best: trial " in out
    assert "All points measured: 4 points, the whole space." in out
    assert out.endswith(f"page: {run_dir.report}\n")
    assert 'http-equiv="refresh"' in shown_results[0]
    parsed = Parsed(run_dir.report.read_text())
    assert not any(attributes.get("http-equiv") == "refresh" for attributes in parsed.all("meta"))
    assert "complete" in parsed.text


@pytest.mark.processes
def test_ctrl_c_ends_it_as_it_ends_every_command(tmp_path: Path) -> None:
    run_dir = running(tmp_path / "s")
    command = [sys.executable, "-m", "service", "report", str(run_dir.root), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        wait_until(lambda: watching.poll() is not None or run_dir.report.exists())
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=30)
    assert watching.returncode == 130
    assert "Traceback" not in err


def test_a_run_that_has_ended_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = sweep_dir(tmp_path / "s", SPACE)
    code, out, _ = run(capsys, "report", run_dir.root, "--watch")
    assert code == 0
    assert out.count("best: trial") == 1


@pytest.mark.processes
def test_a_run_whose_driver_was_killed_is_not_followed_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = running(tmp_path / "s")
    driver = (
        "import pathlib, sys, time; from service.runs.run_directory import locked_run; from trainables.rundir import RunDir\n"
        "with locked_run(RunDir(pathlib.Path(sys.argv[1]))): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", driver, str(run_dir.root)], stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdout is not None
        assert holding.stdout.readline() == "held\n"
        assert not abandoned(run_dir)
        holding.kill()
    assert abandoned(run_dir)
    code, out, _ = run(capsys, "report", run_dir.root, "--watch")
    assert code == 0
    for shown in (out, run(capsys, "report", run_dir.root)[1]):
        assert re.search(r": interrupted not running since [\d-]+ [\d:]+: its process is gone\n", shown)
        assert f"continue it with: distill resume {run_dir.root}\n" in shown
    assert not any(attributes.get("http-equiv") == "refresh" for attributes in Parsed(run_dir.report.read_text()).all("meta"))


def test_a_screen_shows_the_best_trial_and_those_that_ended_last() -> None:
    rows = [typed_row({"id": f"{n:03d}", "status": "ok" if n < 90 else "pending"}) for n in range(100)]
    assert rows_on_screen(typed({"trials": rows, "chosen": "003"}), 32) == {"003", *(f"{n:03d}" for n in range(70, 90))}
    assert rows_on_screen(typed({"trials": rows[:2], "chosen": "000"}), 40) == {"000", "001"}
