"""Whether launching a step takes longer than running it on the GPU: `train.cuda_graphs: auto`."""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from trainables.distributed.group import Group, all_reduce_sum, gather_objects
from trainables.engine.pass_latency import normalised_by_batch, passes, unchanged
from trainables.engine.step import TrainState
from trainables.failures import kind_of

log = logging.getLogger("raydistill")
_ROUNDS = 3
_WORTH_IT = 0.9
"""Graphs are taken where they bring a step below this part of its time."""
_CYCLES_PER_S = 2.5e9
"""About the fastest clock of a GPU: so many cycles take a second or longer."""
_MAX_LAUNCH_S = 0.2
"""A step that takes longer to launch has more operations than a GPU's queue holds."""


class StepTimes(NamedTuple):
    """Of the passes of a step, in seconds."""

    launch_s: float
    """Of the host, to launch them."""
    device_s: float
    """Of the GPU, to run them once they are launched."""
    allreduce_s: float = 0.0
    """Of the gradients over all workers. DDP hides it behind the backward pass; between two graphs nothing does."""

    @property
    def is_launch_bound(self) -> bool:
        """Whether graphs make the step faster: then it takes what the GPU needs, and the all-reduce comes after it."""
        return self.device_s + self.allreduce_s < _WORTH_IT * self.launch_s


def is_launch_bound(train_state: TrainState, stage: str, *, image_size: int, num_images: int) -> bool:
    """Whether CUDA graphs would make a worker's steps on so many images faster; the log says why. All ranks agree.

    Raises what a step raises that runs out of memory.
    """
    group = train_state.group
    measured: StepTimes | str
    try:
        measured = measure(train_state, image_size, num_images)
    except Exception as error:  # a method's own code may refuse images of zeros, which are no samples
        if kind_of(error) in ("out_of_memory", "device"):
            raise
        message = str(error).strip().partition("\n")[0]
        measured = f"{type(error).__name__}: {message}"
    by_rank = gather_objects(measured, group)
    times = [each for each in by_rank if isinstance(each, StepTimes)]
    if len(times) < len(by_rank):
        if group.is_main:
            reason = next(each for each in by_rank if isinstance(each, str))
            log.info("%s: train.cuda_graphs: auto: no CUDA graphs, for its steps cannot be timed: %s", stage, reason)
        return False
    allreduce_s = _allreduce_s(train_state) if group.world_size > 1 else 0.0
    launch_s, device_s = (max(values) for values in zip(*(each[:2] for each in times), strict=True))
    slowest = StepTimes(launch_s, device_s, max(gather_objects(allreduce_s, group)))
    if group.is_main:
        log.info(
            "%s: train.cuda_graphs: auto: %s: to launch a step's passes takes %.1f ms, to run them %.1f ms%s",
            stage,
            "CUDA graphs" if slowest.is_launch_bound else "no CUDA graphs",
            1e3 * launch_s,
            1e3 * device_s,
            f", and to average their gradients {1e3 * slowest.allreduce_s:.1f} ms" if group.world_size > 1 else "",
        )
    return slowest.is_launch_bound


def measure(train_state: TrainState, image_size: int, num_images: int) -> StepTimes:
    """The times of this rank alone: the least of a few rounds. Nothing of the training is changed, see `pass_latency`."""
    device = train_state.group.device
    with unchanged(train_state.distillation_module):
        run = passes(train_state, image_size, num_images)
        with normalised_by_batch(train_state.distillation_module, num_images):
            _launch_s(run, device)  # kernels are loaded
            rounds = [_round(run, device) for _ in range(_ROUNDS)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return StepTimes(*(min(values) for values in zip(*rounds, strict=True)))


def _round(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Seconds to launch the passes, and seconds that the device runs them."""
    launch_s = _launch_s(run, device)
    if device.type != "cuda":
        return launch_s, launch_s
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device begins when all is launched, and waits for nothing: half as long again covers a clock that is faster.
    torch.cuda._sleep(int(1.5 * min(launch_s, _MAX_LAUNCH_S) * _CYCLES_PER_S))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return launch_s, began.elapsed_time(ended) / 1e3


def _launch_s(run: Callable[[], None], device: torch.device) -> float:
    began_s = time.perf_counter()
    run()
    took_s = time.perf_counter() - began_s
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return took_s


def _allreduce_s(train_state: TrainState) -> float:
    """Seconds of an all-reduce as large as the gradients. Every rank calls it."""
    group: Group = train_state.group
    num_elements = sum(each.numel() for each in train_state.distillation_module.parameters() if each.requires_grad)
    flat = torch.zeros(num_elements, device=group.device)

    def run() -> float:
        began_s = time.perf_counter()
        all_reduce_sum(flat, group)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        return time.perf_counter() - began_s

    run()  # connections are made
    return min(run() for _ in range(_ROUNDS))
