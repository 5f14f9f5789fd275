"""A teacher service: serves the logits of several students, and computes each row once.

Logits are a function of key, epoch and sample, whoever requests them, however often and in whatever order. So a client that lost
a response repeats the request, and clients that request the same image at once wait for the same computation.

Shapes: B samples of a request, R of them sent with their images, n rows of one task, N samples of the training split, K classes.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.teachers.service.compute_thread import ComputeTask, ComputeThread
from trainables.teachers.service.loaded_teachers import IDLE_TIMEOUT_S, MEMORY_BYTES, Build, LoadedTeacher, LoadedTeachers
from trainables.teachers.service.logits_memory import MISSING, EpochIndex
from trainables.teachers.service.protocol import LogitsRequest, LogitsResponse

UPLOAD_TIMEOUT_S = 2.0
"""So long other clients wait for the images that one client was asked to send; then one of them is asked."""
_NO_ROWS = np.empty(0, dtype=np.int64)


class _OpenRequest(NamedTuple):
    """A request without a response so far."""

    request: LogitsRequest
    future: Future[LogitsResponse]
    num_computed: int = 0
    """Of images that were sent with it before."""


@dataclass(eq=False)
class _PartialResponse:
    """The logits of a request of which computations are under way."""

    logits_BK: NDArray[Any]
    num_computed: int
    future: Future[LogitsResponse]
    num_missing: int = 0
    """Computations whose rows are still missing."""


@dataclass(eq=False)
class _Computation:
    """Rows that a network computes."""

    index: EpochIndex
    samples_n: NDArray[np.int64]
    waiting: list[tuple[_PartialResponse, NDArray[np.intp], NDArray[np.intp]]] = field(default_factory=list)
    """A response, its rows, and the rows of this computation that they get."""


@dataclass(eq=False)
class _Upload:
    """Rows whose images one client was asked to send."""

    teacher: LoadedTeacher
    index: EpochIndex
    samples_n: NDArray[np.int64]
    deadline_s: float
    """On the monotonic clock."""
    waiting: list[_OpenRequest] = field(default_factory=list)
    """Requests of other clients for these rows."""


class TeacherService:
    """Networks by key, and the logits that they computed. Its methods return at once and are thread-safe."""

    def __init__(
        self,
        build: Build,
        *,
        memory_bytes: int = MEMORY_BYTES,
        upload_timeout_s: float = UPLOAD_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """See `LoadedTeachers`."""
        self._upload_timeout_s = upload_timeout_s
        self._lock = threading.Lock()
        self._teachers = LoadedTeachers(build, self._lock, memory_bytes=memory_bytes, idle_timeout_s=idle_timeout_s)
        self._computations: dict[int, _Computation] = {}
        self._uploads: dict[int, _Upload] = {}
        """Both by the token with which their rows are reserved, the oldest first."""
        self._compute_thread = ComputeThread()
        self._num_tokens, self._num_computed, self._num_returned = 0, 0, 0
        self._closed = threading.Event()
        self._expiry_thread = threading.Thread(target=self._expire_uploads, name="uploads", daemon=True)
        self._expiry_thread.start()

    def open(self, key: str, settings: dict[str, Any], classes: Sequence[str], num_samples: int) -> Future[None]:
        """Load the network of `key`, for samples 0 … N-1; done when it is loaded. After a failure the next call tries again."""
        return self._teachers.open(key, settings, classes, num_samples)

    def logits(self, request: LogitsRequest) -> Future[LogitsResponse]:
        """See `LogitsResponse`. Images that are sent with a request are computed in any case."""
        future: Future[LogitsResponse] = Future()
        self._handle([_OpenRequest(request, future)])
        return future

    def counts(self) -> dict[str, int]:
        """Images since the service began: `computed` by the networks, and `returned` to clients."""
        with self._lock:
            return {"computed": self._num_computed, "returned": self._num_returned}

    def close(self) -> None:
        """End the threads; open requests get no response any more."""
        self._closed.set()
        self._expiry_thread.join()
        self._compute_thread.close()
        self._teachers.close()

    def _handle(self, requests: Sequence[_OpenRequest]) -> None:
        """Respond to requests, and to those that waited for the images sent with them, as far as that is possible now."""
        responses, queue = list[tuple[Future[LogitsResponse], LogitsResponse]](), list(requests)
        with self._lock:
            while queue:
                opened = queue.pop()
                response = self._respond(opened, queue)
                if response is not None:
                    responses.append((opened.future, response))
        for future, response in responses:
            _resolve(future, response)

    def _respond(self, opened: _OpenRequest, queue: list[_OpenRequest]) -> LogitsResponse | None:
        """The response; None where it comes later. Adds to `queue` the requests that waited for the images sent with this one."""
        request = opened.request
        teacher = self._teachers.requested(request.key)
        if teacher is None:
            return LogitsResponse()
        index = teacher.memory.epoch_index((request.key, request.epoch))
        num_computed = opened.num_computed + self._compute_images(teacher, index, request, queue)
        slots_B = index.slots_N[request.indices_B]
        missing_B = slots_B == MISSING
        if missing_B.any():
            self._begin_upload(teacher, index, request.indices_B[missing_B])
            return LogitsResponse(missing=np.flatnonzero(missing_B), num_computed=num_computed)
        uploads = self._upload_tokens(slots_B)
        if uploads:
            without_images = request._replace(rows_R=_NO_ROWS, images_RHWC=None)
            self._uploads[uploads[0]].waiting.append(_OpenRequest(without_images, opened.future, num_computed))
            return None
        return self._gather(teacher, request.indices_B, slots_B, opened.future, num_computed)

    def _gather(
        self,
        teacher: LoadedTeacher,
        indices_B: NDArray[np.int64],
        slots_B: NDArray[np.int64],
        future: Future[LogitsResponse],
        num_computed: int,
    ) -> LogitsResponse | None:
        """The response with the logits of all rows; None where computations are under way, which then resolve `future`."""
        logits_BK = np.empty((len(indices_B), teacher.network.num_classes), teacher.network.dtype)
        response = _PartialResponse(logits_BK, num_computed, future)
        ready_B = slots_B > MISSING
        logits_BK[ready_B] = teacher.memory.read(slots_B[ready_B])
        for token in np.unique(slots_B[~ready_B]).tolist():
            computation, rows = self._computations[token], np.flatnonzero(slots_B == token)
            order = np.argsort(computation.samples_n)
            found = order[np.searchsorted(computation.samples_n, indices_B[rows], sorter=order)]
            computation.waiting.append((response, rows, found))
            response.num_missing += 1
        self._num_returned += len(indices_B)
        return None if response.num_missing else LogitsResponse(logits_BK, num_computed=num_computed)

    def _compute_images(
        self, teacher: LoadedTeacher, index: EpochIndex, request: LogitsRequest, queue: list[_OpenRequest]
    ) -> int:
        """Queue the sent images whose logits are missing for the network; returns how many they are. `queue`: see `_respond`."""
        if request.images_RHWC is None:
            return 0
        slots_R = index.slots_N[request.indices_B[request.rows_R]]
        uploads = self._upload_tokens(slots_R)
        new_R = (slots_R == MISSING) | np.isin(slots_R, uploads)
        if not new_R.any():
            return 0
        samples_n, token = request.indices_B[request.rows_R[new_R]], self._new_token()
        images_nHWC = request.images_RHWC if new_R.all() else request.images_RHWC[new_R]
        self._computations[token] = _Computation(index, samples_n)
        teacher.num_active += 1
        teacher.memory.reserve(index, samples_n, token)
        on_logits, on_error = partial(self._deliver, teacher, token), partial(self._fail, teacher, token)
        self._compute_thread.add(ComputeTask(teacher.network, request.epoch, samples_n, images_nHWC, on_logits, on_error))
        for upload in uploads:
            queue += self._end_upload(upload)
        return len(samples_n)

    def _deliver(self, teacher: LoadedTeacher, token: int, logits_nK: NDArray[Any]) -> None:
        complete = list[_PartialResponse]()
        with self._lock:
            computation = self._computations[token]
            teacher.memory.write(computation.index, computation.samples_n, logits_nK)
            del self._computations[token]  # not before: until it is in memory, `_fail` has to find it
            teacher.num_active -= 1
            self._num_computed += len(logits_nK)
            for response, rows, found in computation.waiting:
                response.logits_BK[rows] = logits_nK[found]
                response.num_missing -= 1
                if not response.num_missing:
                    complete.append(response)
        for response in complete:
            _resolve(response.future, LogitsResponse(response.logits_BK, num_computed=response.num_computed))

    def _fail(self, teacher: LoadedTeacher, token: int, error: Exception) -> None:
        """Fail the requests that wait for a computation; when they are repeated, it is tried again."""
        with self._lock:
            computation = self._computations.pop(token, None)
            if computation is None:
                return  # it was delivered, as far as it went
            teacher.num_active -= 1
            teacher.memory.release(computation.index, computation.samples_n)
        for response, *_ in computation.waiting:
            _reject(response.future, error)

    def _begin_upload(self, teacher: LoadedTeacher, index: EpochIndex, samples_n: NDArray[np.int64]) -> None:
        """One client is asked to send these images."""
        token = self._new_token()
        teacher.num_active += 1
        self._uploads[token] = _Upload(teacher, index, samples_n, time.monotonic() + self._upload_timeout_s)
        teacher.memory.reserve(index, samples_n, token)

    def _end_upload(self, token: int) -> list[_OpenRequest]:
        """These images are no longer expected; those that were not sent are missing. Returns the requests that waited."""
        upload = self._uploads.pop(token)
        upload.teacher.num_active -= 1
        unsent_n = upload.samples_n[upload.index.slots_N[upload.samples_n] == token]
        upload.teacher.memory.release(upload.index, unsent_n)
        return upload.waiting

    def _expire_uploads(self) -> None:
        """The thread that ends uploads after their time: of the requests that waited, one is asked to send the images.

        An upload that begins while it sleeps expires after it wakes: no notification is needed.
        """
        pause_s = self._upload_timeout_s
        while not self._closed.wait(pause_s):
            with self._lock:
                now_s = time.monotonic()
                late = [token for token, upload in self._uploads.items() if upload.deadline_s <= now_s]
                waiting = [opened for token in late for opened in self._end_upload(token)]
                oldest = next(iter(self._uploads.values()), None)
                pause_s = oldest.deadline_s - now_s if oldest else self._upload_timeout_s
            for opened in waiting:
                try:
                    self._handle([opened])
                except Exception as error:  # of this request alone: the thread serves all
                    _reject(opened.future, error)

    def _upload_tokens(self, slots: NDArray[np.int64]) -> list[int]:
        return [token for token in np.unique(slots[slots < MISSING]).tolist() if token in self._uploads]

    def _new_token(self) -> int:
        self._num_tokens += 1
        return MISSING - self._num_tokens


def _resolve(future: Future[LogitsResponse], response: LogitsResponse) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled, or an error came first
        future.set_result(response)


def _reject(future: Future[LogitsResponse], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled, or there is a response
        future.set_exception(error)
