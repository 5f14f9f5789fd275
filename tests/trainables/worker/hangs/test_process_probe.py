"""Stuck processes, looked at from another one."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from tests.trainables.data.loader.numbered_sources import NumberedSource
from tests.waiting import wait_until
from trainables.config import DataConfig
from trainables.data.loader.batch_reader import Request
from trainables.data.loader.loader import Loader
from trainables.data.loader.loader_process import _SERVER, loader_process
from trainables.stacks import write_stacks_on_signal
from trainables.worker.hangs.process_probe import WorkerProcess, end, inspect

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

WORKER = """\
import ctypes, threading, time
from trainables.worker.hangs.worker_probe import watched

def sleeping_in_python(): time.sleep(1000)
def waiting_with_the_interpreter():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

with watched():
    threading.Thread(target=sleeping_in_python, daemon=True).start()
    print("watched", flush=True)
    {main}()
"""
PARENT = """\
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)", {argument!r}])
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def worker(main: str) -> Iterator[WorkerProcess]:
    with subprocess.Popen([sys.executable, "-c", WORKER.format(main=main)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield WorkerProcess(process.pid)
        process.kill()


@pytest.fixture(scope="module")
def held() -> Iterator[WorkerProcess]:
    with worker("waiting_with_the_interpreter") as process:
        yield process


def test_a_process_that_does_not_let_go_of_the_interpreter_writes_all_its_stacks_and_goes_on(held: WorkerProcess) -> None:
    for _ in range(2):  # the second ones are not those of before
        wait_until(lambda: "waiting_with_the_interpreter" in inspect({3: held})[3].stacks)
        found = inspect({3: held})[3]
        assert found.state == ""
        assert found.stacks.count("in waiting_with_the_interpreter") == 1
        assert found.stacks.count("in sleeping_in_python") == 1
    end({3: held})  # Ray ends it, since nothing is wrong with the process
    assert psutil.pid_exists(held.pid)


def test_a_stopped_process_says_nothing_is_named_and_ended() -> None:
    with worker("sleeping_in_python") as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        found = inspect({0: process})[0]
        assert (found.state, found.stacks) == ("is stopped (SIGSTOP)", "")
        end({0: process})
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert inspect({0: process})[0].state == "has died"


@pytest.mark.parametrize(("argument", "name"), [("other", "child"), (_SERVER, "loader")])
def test_a_stopped_child_is_found_and_the_loader_process_is_named(argument: str, name: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT.format(argument=argument)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        processes = {0: WorkerProcess(parent.pid)}
        try:
            assert inspect(processes)[0].stopped_child == ""
            child.suspend()
            wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
            found = inspect(processes)[0]
            assert (found.state, found.stopped_child) == ("", f"its {name} process is stopped (SIGSTOP)")
        finally:
            child.kill()


def test_a_process_that_is_gone_has_died() -> None:
    with worker("sleeping_in_python") as process:
        pass
    assert inspect({0: process})[0].state == "has died"
    end({0: process})


class _StuckSource(NumberedSource):
    """Nothing of it can be read."""

    def read(self, index: int) -> NDArray[np.uint8]:
        threading.Event().wait()
        raise AssertionError


def test_a_loader_process_writes_its_stacks_too() -> None:
    write_stacks_on_signal()  # as in any worker
    data = DataConfig.model_validate(
        {"global_batch_size": 8, "image_size": 8, "augment": "none", "loader": "process", "loader_workers": 1}
    )
    process = loader_process(data, world_size=1, device=torch.device("cpu"))
    source = _StuckSource(64)
    loader = Loader(source, data, split="train", seed=0, rank=0, world_size=1, loader_workers=1, process=process)
    loader._begin(Request(1, 0, 0, 0, 8))
    me = {0: WorkerProcess(os.getpid())}
    try:
        found = wait_until(lambda: "in read" in (state := inspect(me)[0]).loader_stacks and state)
        assert "in test_a_loader_process_writes_its_stacks_too" in found.stacks
        assert "in read" not in found.stacks
    finally:
        loader.close()


def test_a_process_that_does_not_handle_the_signal_is_not_sent_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert inspect({0: WorkerProcess(process.pid)})[0].stacks == ""
        process.communicate("\n")
    assert process.returncode == 0
