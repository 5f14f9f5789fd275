"""A teacher service in this process: the real one, without Ray."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from trainables.config import TrainConfig
from trainables.errors import TeacherServiceLostError
from trainables.teachers.service.served_network import ServedNetwork
from trainables.teachers.service.server import TeacherService


class LocalConnection:
    """A `TeacherConnection` to a service that tests may kill and start again."""

    def __init__(self, build: Callable[[], TeacherService]) -> None:
        self._build = build
        self.service: TeacherService | None = build()

    def __call__(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        service = self.service
        if service is None:
            raise TeacherServiceLostError("killed")
        future: Future[Any] = getattr(service, method)(*arguments)

        def result(timeout_s: float) -> Any:
            try:
                return future.result(timeout_s)
            except TimeoutError:
                if service is not self.service:
                    raise TeacherServiceLostError("killed") from None
                raise

        return result

    def kill(self) -> None:
        """Its open requests get no response, and its logits are gone."""
        service, self.service = self.service, None
        if service is not None:
            service.close()

    def start(self) -> None:
        self.service = self._build()


def cpu_network(settings: dict[str, Any], classes: Sequence[str]) -> ServedNetwork:
    """What an actor builds, on the CPU."""
    return ServedNetwork(TrainConfig.model_validate(settings), classes, torch.device("cpu"))


@contextlib.contextmanager
def local_services(count: int = 1, **options: Any) -> Iterator[list[LocalConnection]]:
    """Connections to so many services, which end with the context."""
    found = [LocalConnection(lambda: TeacherService(cpu_network, **options)) for _ in range(count)]
    try:
        yield found
    finally:
        for connection in found:
            connection.kill()
