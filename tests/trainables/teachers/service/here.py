"""A teacher's service in this process: the real one, without Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from trainables.config import TrainConfig
from trainables.errors import TeacherServiceLostError
from trainables.teachers.service.served_network import LiveNetwork
from trainables.teachers.service.server import Service


class LineHere:
    """A `Line` to a service that tests may kill and start again."""

    def __init__(self, build: Callable[[], Service]) -> None:
        self._build = build
        self.service: Service | None = build()

    def __call__(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        service = self.service
        if service is None:
            raise TeacherServiceLostError("killed")
        answer: Future[Any] = getattr(service, method)(*arguments)

        def result(timeout_s: float) -> Any:
            try:
                return answer.result(timeout_s)
            except TimeoutError:
                if service is not self.service:
                    raise TeacherServiceLostError("killed") from None
                raise

        return result

    def kill(self) -> None:
        """Whatever it was asked is never answered, and what it remembered is gone."""
        service, self.service = self.service, None
        if service is not None:
            service.close()

    def start(self) -> None:
        self.service = self._build()


def live(settings: dict[str, Any], classes: Sequence[str]) -> LiveNetwork:
    """What an actor builds, on the CPU."""
    return LiveNetwork(TrainConfig.model_validate(settings), classes, torch.device("cpu"))


@contextlib.contextmanager
def lines(count: int = 1, **options: Any) -> Iterator[list[LineHere]]:
    """Lines to so many services, which end with the context."""
    found = [LineHere(lambda: Service(live, **options)) for _ in range(count)]
    try:
        yield found
    finally:
        for line in found:
            line.kill()
