"""The service without a training: each row computed once for all clients, and what a full memory and failures do."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from trainables.teachers.service.logits_memory import LogitsMemory
from trainables.teachers.service.protocol import LogitsRequest, LogitsResponse
from trainables.teachers.service.server import TeacherService

K, ROW_BYTES = 3, 3 * 8 + 12  # with the epoch index and the sample of the slot
NONE = np.empty(0, dtype=np.int64)


class Numbered:
    """A network whose logits of an image are its only pixel, its sample and the epoch; counts what it runs for."""

    num_classes, dtype = K, np.dtype("float64")

    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []
        self.calls: list[int] = []
        self.fails, self.num_lost_rows = False, 0
        self.may_run = threading.Event()
        self.may_run.set()

    def launch(self, images: Sequence[NDArray[np.uint8]], samples_n: NDArray[np.int64], epoch: int) -> Callable[[], NDArray[Any]]:
        pixels_n = np.concatenate(images)[:, 0, 0, 0]

        def run() -> NDArray[Any]:
            self.may_run.wait()
            if self.fails:
                raise ArithmeticError("the teacher cannot")
            self.ran += [(epoch, int(sample)) for sample in samples_n]
            self.calls.append(len(samples_n))
            rows = np.stack([pixels_n.astype(float), samples_n.astype(float), np.full(len(samples_n), float(epoch))], axis=1)
            return rows[self.num_lost_rows :]

        return run


def pixels(samples: NDArray[np.int64]) -> NDArray[np.uint8]:
    return (samples % 251).astype(np.uint8)[:, None, None, None].repeat(3, axis=3)


def served(**options: Any) -> tuple[TeacherService, Numbered]:
    network = Numbered()
    service = TeacherService(lambda settings, classes: network, **options)
    service.open("key", {}, ("a", "b", "c"), 1000).result(5)
    return service, network


def fetch(
    service: TeacherService, samples: NDArray[np.int64], epoch: int = 0, key: str = "key", sent: list[int] | None = None
) -> LogitsResponse:
    """As a worker does: first without images, then with those that are missing; `sent` gets their numbers."""
    sent = [] if sent is None else sent
    rows, computed = NONE, 0
    while True:
        images = pixels(samples[rows]) if len(rows) else None
        sent.append(len(rows))
        response = service.logits(LogitsRequest(key, epoch, samples, rows, images)).result(5)
        computed += response.num_computed
        if response.logits_BK is not None:
            return response._replace(num_computed=computed)
        assert response.missing is not None
        rows = np.union1d(rows, response.missing)


def is_right(response: LogitsResponse, samples: NDArray[np.int64], epoch: int = 0) -> bool:
    assert response.logits_BK is not None
    return np.array_equal(response.logits_BK, np.stack([samples % 251, samples, np.full(len(samples), epoch)], axis=1))


def test_many_clients_that_request_the_same_at_once_cause_one_computation() -> None:
    service, network = served(upload_timeout_s=60.0)
    sent = list[int]()
    order = np.random.default_rng(0).permutation(1000)

    def student(number: int) -> int:
        computed = 0
        for epoch in range(2):
            for part in np.array_split(order, 20):
                samples = np.random.default_rng(number).permutation(part)
                response = fetch(service, samples, epoch, sent=sent)
                assert is_right(response, samples, epoch)
                computed += response.num_computed
        return computed

    with ThreadPoolExecutor(8) as students:
        computed = sum(students.map(student, range(8)))
    assert sorted(network.ran) == [(epoch, sample) for epoch in range(2) for sample in range(1000)]
    assert computed == sum(sent) == 2000
    assert service.counts() == {"computed": 2000, "returned": 16000}
    service.close()


def test_batches_that_overlap_send_each_image_once() -> None:
    service, network = served(upload_timeout_s=60.0)
    sent = list[int]()

    def student(size: int) -> None:
        for start in range(0, 1000, size):
            samples = np.arange(start, min(start + size, 1000))
            assert is_right(fetch(service, samples, sent=sent), samples)

    with ThreadPoolExecutor(4) as students:
        list(students.map(student, (30, 41, 64, 100)))
    assert sorted(network.ran) == [(0, sample) for sample in range(1000)]
    assert sum(sent) == 1000
    service.close()


def test_images_that_one_client_does_not_send_are_requested_from_another() -> None:
    service, network = served(upload_timeout_s=0.2)
    lost = service.logits(LogitsRequest("key", 0, np.arange(10), NONE, None)).result(5)
    assert lost.missing is not None
    assert lost.missing.tolist() == list(range(10))
    waiting = service.logits(LogitsRequest("key", 0, np.arange(5, 10), NONE, None))
    assert not waiting.done()
    again = waiting.result(5)
    assert again.missing is not None
    assert again.missing.tolist() == list(range(5))
    assert is_right(fetch(service, np.arange(10)), np.arange(10))
    assert len(network.ran) == 10
    service.close()


def test_a_request_that_fails_or_is_cancelled_harms_no_other_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    service, _ = served(upload_timeout_s=0.2)
    requests = [LogitsRequest("key", 0, np.arange(start, 10), NONE, None) for start in (0, 4, 5, 6)]
    assert service.logits(requests[0]).result(5).missing is not None  # and they are never sent
    failing, cancelled, waits = (service.logits(request) for request in requests[1:])
    respond = TeacherService._respond

    def failing_once(self: TeacherService, opened: Any, queue: Any) -> LogitsResponse | None:
        if opened.future is failing:
            raise MemoryError("no room for the logits")
        response = respond(self, opened, queue)
        cancelled.cancel()  # while its response is on its way
        return response

    monkeypatch.setattr(TeacherService, "_respond", failing_once)
    with pytest.raises(MemoryError):
        failing.result(5)
    assert waits.result(5).missing is not None
    monkeypatch.undo()
    lost = service.logits(LogitsRequest("key", 0, np.arange(20, 30), NONE, None)).result(5)
    assert lost.missing is not None
    assert (
        service.logits(LogitsRequest("key", 0, np.arange(25, 30), NONE, None)).result(5).missing is not None
    )  # the thread goes on
    service.close()


def test_logits_that_memory_cannot_take_fail_their_requests_and_are_computed_when_repeated() -> None:
    service, network = served()
    samples = np.arange(10)
    network.num_lost_rows = 1
    with pytest.raises(ValueError, match="shape"):
        service.logits(LogitsRequest("key", 0, samples, samples, pixels(samples))).result(5)
    network.num_lost_rows = 0
    assert is_right(fetch(service, samples), samples)
    service.close()


def test_a_request_that_is_cancelled_while_its_computation_fails_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    service, network = served()
    network.fails = True
    network.may_run.clear()
    request = LogitsRequest("key", 0, np.arange(10), np.arange(10), pixels(np.arange(10)))
    cancelled, other = service.logits(request), service.logits(request)
    set_exception = Future.set_exception

    def cancel_first(self: Future[Any], error: BaseException | None) -> None:
        cancelled.cancel()
        set_exception(self, error)

    monkeypatch.setattr(Future, "set_exception", cancel_first)
    network.may_run.set()
    with pytest.raises(ArithmeticError):
        other.result(5)
    monkeypatch.undo()
    network.fails = False
    assert is_right(fetch(service, np.arange(10)), np.arange(10))
    service.close()


def test_an_idle_network_is_gone_before_the_next_is_built() -> None:
    alive = weakref.WeakSet[Numbered]()

    def build(settings: dict[str, Any], classes: Sequence[str]) -> Numbered:
        gc.collect()
        assert not alive
        network = Numbered()
        alive.add(network)
        return network

    service = TeacherService(build, idle_timeout_s=0.0)
    gc.freeze()  # a collection then looks at what this test makes, not at all that is imported
    try:
        for key in ("first", "second"):
            service.open(key, {}, ("a", "b", "c"), 1000).result(5)
    finally:
        gc.unfreeze()
    service.close()


def test_images_are_requested_for_what_is_neither_computed_nor_under_way() -> None:
    service, network = served()
    fetch(service, np.arange(10))
    network.may_run.clear()
    under_way = service.logits(LogitsRequest("key", 0, np.arange(10, 20), np.arange(10), pixels(np.arange(10, 20))))
    requested = service.logits(LogitsRequest("key", 0, np.arange(25), NONE, None)).result(5)
    assert requested.missing is not None
    assert requested.missing.tolist() == [20, 21, 22, 23, 24]
    waits = service.logits(LogitsRequest("key", 0, np.arange(20), NONE, None))
    assert not waits.done()
    network.may_run.set()
    assert is_right(waits.result(5), np.arange(20))
    assert is_right(under_way.result(5), np.arange(10, 20))
    service.close()


def test_what_waits_is_computed_together_up_to_a_workers_largest_batch() -> None:
    service, network = served()
    fetch(service, np.arange(64))
    network.may_run.clear()
    first = service.logits(LogitsRequest("key", 0, np.arange(100, 110), np.arange(10), pixels(np.arange(100, 110))))
    waiting = []
    for start in range(200, 300, 20):
        samples = np.arange(start, start + 20)
        waiting.append((samples, service.logits(LogitsRequest("key", 0, samples, np.arange(20), pixels(samples)))))
    network.may_run.set()
    assert is_right(first.result(5), np.arange(100, 110))
    assert all(is_right(response.result(5), samples) for samples, response in waiting)
    assert sum(network.calls[1:]) == 110
    assert len(network.calls) <= 4
    assert max(network.calls) <= 64
    service.close()


def test_the_oldest_logits_make_room_and_are_computed_again() -> None:
    service, _ = served(memory_bytes=100 * ROW_BYTES)
    for start in (0, 50, 100):
        fetch(service, np.arange(start, start + 50))
    assert fetch(service, np.arange(50, 150)).num_computed == 0
    assert fetch(service, np.arange(50)).num_computed == 50
    assert is_right(fetch(service, np.arange(150)), np.arange(150))
    service.close()


def test_a_batch_larger_than_the_memory_gets_its_logits_all_the_same() -> None:
    service, _ = served(memory_bytes=7 * ROW_BYTES)
    for epoch in range(3):
        assert is_right(fetch(service, np.arange(40), epoch), np.arange(40), epoch)
    assert is_right(fetch(service, np.arange(20, 60), 2), np.arange(20, 60), 2)
    assert fetch(service, np.arange(53, 60), 2).num_computed == 0
    service.close()


def test_runs_with_a_key_of_their_own_share_the_network_and_no_logits() -> None:
    service, _ = served()
    assert fetch(service, np.arange(10)).num_computed == 10
    assert fetch(service, np.arange(10), key="key-trial").num_computed == 10
    assert fetch(service, np.arange(10), key="key-trial").num_computed == 0
    assert service.logits(LogitsRequest("other", 0, np.arange(10), NONE, None)).result(5) == LogitsResponse()
    service.close()


def test_a_network_that_fails_fails_all_requests_that_wait_and_is_tried_again() -> None:
    service, network = served()
    network.fails = True
    network.may_run.clear()
    samples = np.arange(8)
    first = service.logits(LogitsRequest("key", 0, samples, np.arange(8), pixels(samples)))
    second = service.logits(LogitsRequest("key", 0, samples[::-1].copy(), NONE, None))
    network.may_run.set()
    for future in (first, second):
        with pytest.raises(ArithmeticError, match="the teacher cannot"):
            future.result(5)
    network.fails = False
    assert is_right(fetch(service, samples), samples)
    service.close()


def test_a_teacher_that_cannot_be_loaded_raises_why_each_time() -> None:
    tries = list[int]()

    def build(settings: dict[str, Any], classes: Sequence[str]) -> Numbered:
        tries.append(1)
        raise FileNotFoundError("no such teacher")

    service = TeacherService(build)
    for number in (1, 2):
        with pytest.raises(FileNotFoundError, match="no such teacher"):
            service.open("key", {}, ("a", "b", "c"), 10).result(5)
        assert len(tries) == number
    service.close()


def test_a_network_without_requests_is_dropped_when_another_is_opened_and_opens_again() -> None:
    opened: list[str] = []

    def build(settings: dict[str, Any], classes: Sequence[str]) -> Numbered:
        opened.append(settings["of"])
        return Numbered()

    service = TeacherService(build, idle_timeout_s=0.0)
    for key in ("one", "two"):
        service.open(key, {"of": key}, ("a", "b", "c"), 1000).result(5)
        fetch(service, np.arange(10), key=key)
    assert service.logits(LogitsRequest("one", 0, np.arange(10), NONE, None)).result(5) == LogitsResponse()  # not loaded
    service.open("one", {"of": "one"}, ("a", "b", "c"), 1000).result(5)
    assert fetch(service, np.arange(10), key="one").num_computed == 10
    assert opened == ["one", "two", "one"]


def test_an_empty_memory_takes_next_to_nothing_from_the_system() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    memory = LogitsMemory(1 << 30, 1000, 2, np.dtype("float32"))
    assert process.memory_info().rss - before < 1 << 24
    assert memory.epoch_index("epoch").num_used == 0
