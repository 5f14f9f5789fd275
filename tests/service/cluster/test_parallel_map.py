"""Spread work that fails: in one line where a cluster loses a part of it, and with its own processes alone."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from service.cluster import parallel_map as parallel
from trainables.errors import DistillError


@pytest.mark.parametrize("lost", [ray.exceptions.NodeDiedError("gone"), ray.exceptions.OutOfMemoryError("a\nlong\nstory")])
def test_a_node_that_dies_ends_the_command_in_one_line(lost: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(_: object) -> None:
        raise lost

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(parallel, "connect", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(ray, "remote", lambda _: task)
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(DistillError) as caught:
        list(parallel.parallel_map(len, [("a",), ("b",)], 2, tmp_path))
    assert str(caught.value) == (
        f"a process or a node of the cluster was lost ({type(lost).__name__}), probably out of memory; "
        "repeat the command to continue"
    )


def refuse(word: str) -> None:
    raise DistillError(word)


def test_work_that_fails_ends_its_own_processes_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    bystander = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    bystander.start()
    try:
        with pytest.raises(DistillError, match="no"):
            list(parallel.parallel_map(refuse, [("no",), ("no",)], 2, tmp_path))
        bystander.join(0.5)
        assert bystander.is_alive()
    finally:
        bystander.kill()
        bystander.join()


def sleep_behind_the_first(number: int) -> int:
    if number:
        time.sleep(60)
    return number


def test_ctrl_c_while_calls_wait_ends_no_thread_with_a_stack_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died, shutdown = list[object](), ProcessPoolExecutor.shutdown

    def late(self: ProcessPoolExecutor, **options: bool) -> None:
        time.sleep(0.3)  # the pool's thread finds its processes ended first, as on a busy machine
        shutdown(self, **options)

    monkeypatch.setattr(ProcessPoolExecutor, "shutdown", late)
    monkeypatch.setattr(threading, "excepthook", died.append)
    monkeypatch.setattr(parallel, "is_local", lambda: True)
    results = parallel.parallel_map(sleep_behind_the_first, [(number,) for number in range(40)], 2, tmp_path)
    assert next(results) == 0
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert died == []
