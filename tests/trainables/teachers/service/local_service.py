"""A teacher service in this process: the actor's class in an event loop of its own, without Ray."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import torch

from trainables.errors import TeacherServiceLostError
from trainables.teachers.service.actor import TeacherActor


class LocalConnection:
    """A `TeacherConnection` to an actor that tests may kill and start again."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.start()

    def __call__(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        loop = self._loop
        if loop is None:
            raise TeacherServiceLostError("killed")
        future = self.begin(method, *arguments)

        def result(timeout_s: float) -> Any:
            try:
                return future.result(timeout_s)
            except (TimeoutError, CancelledError):
                if loop is not self._loop:
                    raise TeacherServiceLostError("killed") from None
                raise

        return result

    def begin(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call of a method of the actor, which must be alive."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(getattr(self._actor, method)(*arguments), self._loop)

    @property
    def num_computed(self) -> int:
        """Images that the actor computed since it was last started; 0 where it is dead."""
        return 0 if self._loop is None else int(self.begin("counts").result(60)["computed"])

    def kill(self) -> None:
        """Its open requests get no response, and its logits are gone."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_stop, loop)
            self._thread.join()

    def start(self) -> None:
        self._actor = TeacherActor("cpu", torch.get_num_threads(), **self._options)
        self._loop: asyncio.AbstractEventLoop | None = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.stop)


@contextlib.contextmanager
def local_services(count: int = 1, **options: Any) -> Iterator[list[LocalConnection]]:
    """Connections to so many actors, which end with the context."""
    found = [LocalConnection(**options) for _ in range(count)]
    try:
        yield found
    finally:
        for connection in found:
            connection.kill()
