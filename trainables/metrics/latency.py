"""Measure the latency of a forward pass."""

import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP, MIN_PASSES, MAX_PASSES = 3, 10, 1000


def pass_seconds(run: Callable[[], Any], max_s: float, device: torch.device | None = None) -> list[float]:
    """Return the seconds of each run, including GPU work: at least 10 runs, and up to 1,000 while `max_s` lasts."""
    for _ in range(WARM_UP):
        run()
    seconds, until_s = list[float](), time.perf_counter() + max_s
    while len(seconds) < MIN_PASSES or (time.perf_counter() < until_s and len(seconds) < MAX_PASSES):
        _wait_for(device)
        begin_s = time.perf_counter()
        run()
        _wait_for(device)
        seconds.append(time.perf_counter() - begin_s)
    return seconds


def _wait_for(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
