"""What a step takes of its node's cores: the process's computing, and waits for a free core."""

import threading
import time

import pytest

from trainables.metrics.host_use import HostUse


def burn(seconds: float) -> None:
    """Compute on the calling thread."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def test_the_means_are_of_steps_past_the_warm_up_and_count_all_threads_of_the_process() -> None:
    host = HostUse(warmup_steps=1)
    assert host.summary() == {}
    for seconds in (0.2, 0.01, 0.03):
        host.start()
        other = threading.Thread(target=burn, args=(seconds / 2,))
        other.start()
        burn(seconds / 2)
        other.join()
        host.stop()
        burn(0.02)  # between steps
    found = host.summary()
    assert found["phase/cpu_ms"] == pytest.approx(20, abs=5)
    assert found["phase/core_wait_ms"] >= 0


def test_a_step_that_sleeps_computes_nothing() -> None:
    host = HostUse()
    host.start()
    time.sleep(0.05)
    host.stop()
    assert host.summary()["phase/cpu_ms"] < 25
