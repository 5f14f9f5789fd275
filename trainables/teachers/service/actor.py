"""A teacher service as a process of its own: the class of a Ray actor. Knows no Ray."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from trainables.config import TrainConfig
from trainables.device.precision import set_matmul_precision
from trainables.failures import kind_of
from trainables.object_store.stage_copy import fetch_inputs
from trainables.process_exit import skip_exit_handlers
from trainables.teachers.service.protocol import LogitsRequest, LogitsResponse
from trainables.teachers.service.served_network import ServedNetwork
from trainables.teachers.service.server import TeacherService

T = TypeVar("T")


class TeacherActor:
    """A `TeacherService` with coroutines as methods: any number of requests wait in it at once."""

    def __init__(self, device: str, threads: int) -> None:
        """`threads`: compute threads on a CPU."""
        skip_exit_handlers()
        torch.set_num_threads(threads)
        set_matmul_precision()

        def build(settings: dict[str, Any], classes: Sequence[str]) -> ServedNetwork:
            fetch_inputs(settings)
            return ServedNetwork(TrainConfig.model_validate(settings), classes, torch.device(device))

        self._service = TeacherService(build)

    async def open(self, key: str, settings: dict[str, Any], classes: Sequence[str], num_samples: int) -> None:
        """See `TeacherService`."""
        await _result(self._service.open(key, settings, classes, num_samples))

    async def logits(self, request: LogitsRequest) -> LogitsResponse:
        """See `TeacherService`."""
        return await _result(self._service.logits(request))

    async def counts(self) -> dict[str, int]:
        """See `TeacherService`."""
        return self._service.counts()


async def _result(future: Future[T]) -> T:
    """The future's result. Where the GPU has failed, the process can compute no more: it exits, and Ray starts another."""
    try:
        return await asyncio.wrap_future(future)
    except RuntimeError as error:
        if kind_of(error) == "device":
            os._exit(1)
        raise
