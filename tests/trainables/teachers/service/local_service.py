"""A teacher service in this process: the actor's class in an event loop of its own, without Ray."""

import asyncio
import contextlib
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.errors import TeacherServiceLostError
from trainables.teachers.service.actor import TeacherActor
from trainables.teachers.service.protocol import RowsRequest, RowsResponse


class LocalImages:
    """Images that an actor may fetch, as long as their worker lives."""

    def __init__(self, images_BHWC: NDArray[np.uint8]) -> None:
        self._images_BHWC = images_BHWC
        self.num_fetches, self.are_lost, self.may_arrive = 0, False, threading.Event()
        self.may_arrive.set()

    def __await__(self) -> Generator[Any, None, NDArray[np.uint8]]:
        self.num_fetches += 1
        while not self.may_arrive.is_set():
            yield from asyncio.sleep(0.001).__await__()
        if self.are_lost:
            raise ConnectionError("their owner died")
        return self._images_BHWC


class LocalConnection:
    """A `TeacherConnection` to an actor that tests may kill and start again."""

    def __init__(self, **options: Any) -> None:
        self._options, self._lock = options, threading.Lock()
        self.start()

    def put(self, images_BHWC: NDArray[np.uint8]) -> LocalImages:
        return LocalImages(images_BHWC)

    async def __call__(self, request: RowsRequest) -> RowsResponse:
        with self._lock:
            loop = self._loop
            if loop is None:
                raise TeacherServiceLostError("killed")
            future = self.begin("rows", request)
        try:
            response: RowsResponse = await asyncio.wrap_future(future)
            return response
        except asyncio.CancelledError:
            if loop is self._loop:
                raise
            raise TeacherServiceLostError("killed") from None

    def begin(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call of a method of the actor, which must be alive."""
        assert self._loop is not None
        self._begun.append(asyncio.run_coroutine_threadsafe(getattr(self._actor, method)(*arguments), self._loop))
        return self._begun[-1]

    @property
    def num_computed(self) -> int:
        """Images that the actor computed since it was last started; 0 where it is dead."""
        return 0 if self._loop is None else int(self.begin("counts").result(60)["computed"])

    def kill(self) -> None:
        """Its open requests get no response, and its logits are gone."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_stop, loop)
            self._thread.join()
            for future in self._begun:  # also those that the loop has not seen
                future.cancel()

    def start(self) -> None:
        self._actor, self._begun = TeacherActor("cpu", torch.get_num_threads(), **self._options), list[Future[Any]]()
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
