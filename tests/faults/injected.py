"""Faults put into a real training from outside, one a function: each takes a job that is built and makes it slow.

A fault adds a multiple of a step's time where its cause would. Those that go with the images do so by their number.
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from trainables.device.device_batches import DeviceBatch
from trainables.engine.job import Job

Undo = Callable[[], None]


def nothing() -> None:
    """Where the job alone was changed, there is nothing to put back."""


class Wrapped:
    """Another object with some of its methods replaced."""

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self._inner = inner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def images(job: Job) -> int:
    """Of one rank's step."""
    return job.config.data.global_batch_size // job.group.world_size


def throttled_reader(job: Job, extra_s: float) -> Undo:
    """A disk or network that brings an image late."""
    source, late_s = job.train_loader.source, extra_s / images(job)

    def read(index: int) -> Any:
        time.sleep(late_s)
        return source.read(index)

    job.train_loader._reader._samples._source = Wrapped(source, read=read)  # type: ignore[assignment]
    return nothing


def burning_decoder(job: Job, extra_s: float) -> Undo:
    """Images that take long to decode: another core computes, without Python's lock, as decoders do."""
    decoder, burn_s, noise = job.train_loader._reader._samples._augment._decoder, extra_s / images(job), bytes(100_000)

    def decode(*arguments: Any) -> Any:
        until_s = time.thread_time() + burn_s
        while time.thread_time() < until_s:
            hashlib.sha256(noise).digest()
        return decoder.decode(*arguments)

    job.train_loader._reader._samples._augment._decoder = Wrapped(decoder, decode=decode)  # type: ignore[assignment]
    return nothing


def slow_rank(job: Job, extra_s: float) -> Undo:
    """Rank 1 computes slowly, forward and backward."""
    if job.group.rank == 1:

        def slowly(module: torch.nn.Module, args: Any, logits_BK: torch.Tensor) -> None:
            if module.training:
                time.sleep(extra_s / 3)
                logits_BK.register_hook(lambda gradient: time.sleep(2 * extra_s / 3))

        job.student.register_forward_hook(slowly)
    return nothing


def slow_all_reduce(job: Job, extra_s: float) -> Undo:
    """A network that brings each bucket's sum late, while the ranks compute on."""
    noise = job.train_state.update.noise
    assert noise is not None  # its hook is the one that reduces a bucket
    network, reduce = ThreadPoolExecutor(1), noise._all_reduce

    def late(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced, arrived = reduce(bucket), torch.futures.Future[torch.Tensor]()

        def bring() -> None:
            reduced.wait()
            time.sleep(extra_s)
            arrived.set_result(reduced.value())

        network.submit(bring)
        return arrived

    noise._all_reduce = late  # type: ignore[method-assign]
    return network.shutdown


def slow_copy(job: Job, extra_s: float) -> Undo:
    """A bus that brings a batch to the device late."""
    before = DeviceBatch.wait

    def wait(batch: DeviceBatch) -> None:
        time.sleep(extra_s)
        before(batch)

    def undo() -> None:
        DeviceBatch.wait = before  # type: ignore[method-assign]

    DeviceBatch.wait = wait  # type: ignore[method-assign]
    return undo


def slow_teacher(job: Job, extra_s: float) -> Undo:
    """A teacher that takes long on each image."""
    each_s = extra_s / images(job)
    job.train_state.teacher.networks[0].register_forward_pre_hook(lambda module, args: time.sleep(each_s * len(args[0])))
    return nothing


FAULTS: dict[str, Callable[[Job, float], Undo]] = {
    "throttled reader": throttled_reader,
    "decoder burns CPU": burning_decoder,
    "one slow rank": slow_rank,
    "slow all-reduce": slow_all_reduce,
    "slow copy": slow_copy,
    "slow teacher": slow_teacher,
}
