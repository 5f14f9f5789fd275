"""The stacks of stuck processes, asked for by another process of the node."""

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
from numpy.typing import NDArray

from tests.trainables.data.loader.numbered_sources import NumberedSource
from tests.waiting import wait_until
from trainables.config import DataConfig
from trainables.data.loader.batch_reader import Request
from trainables.data.loader.loader import Loader
from trainables.stacks import ProcessReport, kill, report_processes, write_stacks_on_signal

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

WORKER = """\
import ctypes, threading, time
from trainables.metrics.heartbeat import watched

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


@contextmanager
def worker(main: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", WORKER.format(main=main)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def report(pid: int) -> ProcessReport:
    return report_processes([pid])[pid]


def test_a_process_that_does_not_let_go_of_the_interpreter_writes_all_its_stacks_and_goes_on() -> None:
    with worker("waiting_with_the_interpreter") as pid:
        for _ in range(2):  # the second ones are not those of before
            found = wait_until(lambda: "in waiting_with_the_interpreter" in (each := report(pid)).stacks and each)
            assert found.status in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)  # as it just begins to wait, or has
            assert found.stacks.count("in waiting_with_the_interpreter") == 1
            assert found.stacks.count("in sleeping_in_python") == 1
        kill([pid])
        wait_until(lambda: report(pid).status == psutil.STATUS_ZOMBIE)
    kill([pid])
    assert report(pid) == ProcessReport("gone", "")


def test_a_stopped_process_writes_nothing_and_can_be_ended() -> None:
    with worker("sleeping_in_python") as pid:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        assert report(pid) == ProcessReport("stopped", "")
        kill([pid])
        wait_until(lambda: report(pid).status == psutil.STATUS_ZOMBIE)


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
    loader = Loader(_StuckSource(64), data, split="train", seed=0, rank=0, world_size=1, loader_workers=1)
    loader._begin(Request(1, 0, 0, 0, 8))
    try:
        found = wait_until(lambda: "in read" in (each := report(os.getpid())).stacks and each).stacks
        assert (
            found.index("in test_a_loader_process_writes_its_stacks_too") < found.rindex("\nprocess ") < found.index("in read\n")
        )
    finally:
        loader.close()


def test_a_process_that_does_not_handle_the_signal_is_not_sent_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert report(process.pid).stacks == ""
        process.communicate("\n")
    assert process.returncode == 0
