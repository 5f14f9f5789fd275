"""The servers of a Ray of our own, the thread that uses it, and the exit code of a process whose thread has ended or not."""

import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from service.cluster import local_ray
from service.cluster.local_ray import RayLostError
from tests.waiting import wait_until


@pytest.mark.parametrize("seconds", [0, 600])
def test_a_command_leaves_with_its_code_whatever_its_thread_does(seconds: int) -> None:
    code = (
        "import atexit, time\nfrom service.cluster import local_ray\natexit.register(print, 'whole')\n"
        f"thread = local_ray.start_thread(lambda: time.sleep({seconds}))\nthread.join(1)\n"
        "assert local_ray.in_use() == thread.is_alive()\nlocal_ray.exit_process(130)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stdout == ("" if seconds else "whole\n")  # what shuts Ray down at the exit is not called either


def test_an_interrupted_command_leaves_with_its_code_whatever_shutting_ray_down_would_do() -> None:
    code = (
        "import atexit, ctypes\nfrom service.cluster import local_ray\natexit.register(ctypes.string_at, 0)\n"
        "local_ray.interrupt()\nlocal_ray.exit_process(130)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("moment", ["atexit.register(end)", "Last()"])
def test_a_sigterm_while_a_command_leaves_does_not_change_its_code(moment: str) -> None:
    """Before Python gives up its signal handlers, and after."""
    code = (
        "import atexit, os, signal\nfrom service.cluster import local_ray\n"
        "def end(kill=os.kill, pid=os.getpid()): kill(pid, 15)\n"
        "class Last:\n    def __del__(self, end=end): end()\n"
        f"last = {moment}\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\nlocal_ray.exit_process(2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "")


def test_a_server_that_ends_is_named(tmp_path: Path) -> None:
    (tmp_path / "raylet").symlink_to(shutil.which("sleep") or "")
    with subprocess.Popen([tmp_path / "raylet", "600"]) as raylet:
        wait_until(lambda: psutil.Process(raylet.pid).name() == "raylet")
        local_ray.watch_servers()
        try:
            local_ray.check_ray()
            raylet.kill()
            wait_until(local_ray.is_lost)
            with pytest.raises(RayLostError, match=r"^Ray has ended: its process raylet was killed"):
                local_ray.check_ray()
        finally:
            local_ray._servers.clear()


@pytest.mark.parametrize("again", [0, signal.SIGINT, signal.SIGTERM])
def test_what_a_command_started_ends_with_it_also_where_it_is_interrupted_again(again: int) -> None:
    code = (
        "import os, psutil, signal, subprocess, sys, time\nfrom service.cluster import local_ray\n"
        "suspend = psutil.Process.suspend\n"
        f"psutil.Process.suspend = lambda process: (suspend(process), os.kill(os.getpid(), {int(again)}))\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "child = \"import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()\"\n"
        "process = subprocess.Popen([sys.executable, '-c', child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        "print(process.pid, int(process.stdout.readline()), flush=True)\n"
        "local_ray.start_thread(lambda: time.sleep(600))\nlocal_ray.exit_process(2)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    started = [psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))]
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_a_thread_of_another_library_is_not_taken_for_it_whatever_its_name() -> None:
    other = threading.Event()
    thread = threading.Thread(target=other.wait, name="work", daemon=True)
    thread.start()
    assert not local_ray.in_use()
    own = local_ray.start_thread(other.wait)
    assert local_ray.in_use()
    other.set()
    own.join()
    assert not local_ray.in_use()
    thread.join()
