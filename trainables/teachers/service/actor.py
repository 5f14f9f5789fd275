"""A service as a process of its own: the shell that an actor of Ray wears. Knows no Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from trainables.config import TrainConfig
from trainables.failures import kind_of
from trainables.teachers.service.protocol import Question, Reply
from trainables.teachers.service.served_network import LiveNetwork
from trainables.teachers.service.server import Service

T = TypeVar("T")


class TeacherActor:
    """`Service`, awaited: as many questions at once as there are."""

    def __init__(self, device: str, threads: int) -> None:
        """`threads` compute on a CPU."""
        torch.set_num_threads(threads)

        def build(settings: dict[str, Any], classes: Sequence[str]) -> LiveNetwork:
            return LiveNetwork(TrainConfig.model_validate(settings), classes, torch.device(device))

        self._service = Service(build)

    async def open(self, key: str, settings: dict[str, Any], classes: Sequence[str], num_samples: int) -> None:
        """See `Service`."""
        await _done(self._service.open(key, settings, classes, num_samples))

    async def answer(self, question: Question) -> Reply:
        """See `Service`."""
        return await _done(self._service.answer(question))

    async def counts(self) -> dict[str, int]:
        """See `Service`."""
        return self._service.counts()


async def _done(future: Future[T]) -> T:
    """The result. A process whose GPU has failed can compute no more: it ends, and Ray starts another."""
    try:
        return await asyncio.wrap_future(future)
    except RuntimeError as error:
        if kind_of(error) == "device":
            os._exit(1)
        raise
