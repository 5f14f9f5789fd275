"""SIGTERM to pytest ends it, and what its tests have started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

WAITING = """
import multiprocessing, os, subprocess, sys, time
import pytest

@pytest.fixture
def server():
    yield
    print("torn down", flush=True)

def test_that_waits(server):
    grandchild = "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"
    child = subprocess.Popen([sys.executable, "-c", grandchild], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    forked.start()
    time.sleep(0.5)
    forked.terminate()
    forked.join()
    print("forked ended with", forked.exitcode, flush=True)
    print("ready", flush=True)
    {wait}

def test_that_comes_next():
    print("went on", flush=True)
"""
WAITS = {
    "a test that waits": "time.sleep(600)",
    "a test that catches Ctrl-C": "with pytest.raises(KeyboardInterrupt): time.sleep(600)",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_sigterm_ends_pytest_and_what_its_tests_have_started(tmp_path: Path, wait: str) -> None:
    (tmp_path / "test_waiting.py").write_text(WAITING.format(wait=wait))
    options = ["-s", "-p", "tests.conftest", "-c", os.devnull, f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        before = "".join(iter(session.stdout.readline, "ready\n"))
        family = psutil.Process(session.pid).children(recursive=True)
        session.send_signal(signal.SIGTERM)
        after = session.stdout.read()
    _, left = psutil.wait_procs(family, timeout=20)
    for process in left:
        process.kill()
    assert f"forked ended with {-signal.SIGTERM}" in before
    assert "torn down" in after
    assert "went on" not in after
    assert session.returncode == pytest.ExitCode.INTERRUPTED, after
    assert len(family) == 2
    assert left == []
