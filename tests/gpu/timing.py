"""Sides that take turns on one device: throughput, the host's time to launch a step, and the device's to run it."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Step = Callable[[], object]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(step: Step, count: int, device: torch.device) -> float:
    """Wall time of so many steps on end, from an idle device to an idle device."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return time.perf_counter() - began


def in_rounds(sides: Mapping[str, Step], device: torch.device, *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds a step of each side in each round; all sides take turns, each first in its own."""
    names = list(sides)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(1e3 * seconds_of(sides[name], steps, device) / steps)
    return taken


def host_ms(step: Step, device: torch.device, count: int = 10) -> float:
    """Median milliseconds until a step that began on an idle device is launched, whether or not it has run."""
    taken = []
    for _ in range(count):
        synchronize(device)
        began = time.perf_counter()
        step()
        taken.append(1e3 * (time.perf_counter() - began))
    synchronize(device)
    return statistics.median(taken)


def device_ms(step: Step, device: torch.device, launch_ms: float, count: int = 5) -> float:
    """Median milliseconds of the device for a step, by events: it has so much to do before that all is launched by then."""
    cycles = int(2e6 * (1.5 * launch_ms + 1.0))  # at most 2 GHz
    taken = []
    for _ in range(count):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        began.record()
        step()
        ended.record()
        torch.cuda.synchronize(device)
        taken.append(began.elapsed_time(ended))
    return statistics.median(taken)


def spread_pct(values: Sequence[float]) -> float:
    """From the least to the most, in percent of the median."""
    return 100 * (max(values) - min(values)) / statistics.median(values)


def compare(
    sides: Mapping[str, Step], device: torch.device, *, batch: int, rounds: int, steps: int, warm_up: int
) -> dict[str, float]:
    """Of each side: `images_per_s/…`, `spread_pct/…`, `host_ms/…` and on a GPU `device_ms/…`; and `ours/…`, the median over
    rounds of a peer's time by that of the side `ours`.
    """
    found: dict[str, float] = {}
    for name, step in sides.items():
        seconds_of(step, warm_up, device)
        found[f"host_ms/{name}"] = host_ms(step, device)
        if device.type == "cuda":
            found[f"device_ms/{name}"] = device_ms(step, device, found[f"host_ms/{name}"])
    taken = in_rounds(sides, device, rounds=rounds, steps=steps)
    for name, ms in taken.items():
        found[f"images_per_s/{name}"] = 1e3 * batch / statistics.median(ms)
        found[f"spread_pct/{name}"] = spread_pct(ms)
    for name in sides:
        if name != "ours" and "ours" in sides:
            ratios = [theirs / ours for ours, theirs in zip(taken["ours"], taken[name], strict=True)]
            found[f"ours/{name}"] = statistics.median(ratios)
            found[f"ours_low/{name}"], found[f"ours_high/{name}"] = min(ratios), max(ratios)
    return found
