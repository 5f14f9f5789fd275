"""The service by itself: each answer computed once, whoever asks, and what becomes of memory that is full and of failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from trainables.teachers.service.logits_memory import Memory
from trainables.teachers.service.protocol import Question, Reply
from trainables.teachers.service.server import Service

K, ROW_BYTES = 3, 3 * 8 + 12  # with the page and the sample that they belong to
NONE = np.empty(0, dtype=np.int64)


class Numbered:
    """A network whose answer to an image is its only pixel, its sample and the epoch; counts what it runs for."""

    num_classes, dtype = K, np.dtype("float64")

    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []
        self.calls: list[int] = []
        self.fails = False
        self.may_run = threading.Event()
        self.may_run.set()

    def begin(self, images: Sequence[NDArray[np.uint8]], samples_n: NDArray[np.int64], epoch: int) -> Callable[[], NDArray[Any]]:
        pixels_n = np.concatenate(images)[:, 0, 0, 0]

        def run() -> NDArray[Any]:
            self.may_run.wait()
            if self.fails:
                raise ArithmeticError("the teacher cannot")
            self.ran += [(epoch, int(sample)) for sample in samples_n]
            self.calls.append(len(samples_n))
            return np.stack([pixels_n.astype(float), samples_n.astype(float), np.full(len(samples_n), float(epoch))], axis=1)

        return run


def pixels(samples: NDArray[np.int64]) -> NDArray[np.uint8]:
    return (samples % 251).astype(np.uint8)[:, None, None, None].repeat(3, axis=3)


def served(**options: Any) -> tuple[Service, Numbered]:
    network = Numbered()
    service = Service(lambda settings, classes: network, **options)
    service.open("key", {}, ("a", "b", "c"), 1000).result(5)
    return service, network


def ask(service: Service, samples: NDArray[np.int64], epoch: int = 0, key: str = "key", sent: list[int] | None = None) -> Reply:
    """As a worker does: first without images, then with those that are wanted; how many is noted in `sent`."""
    sent = [] if sent is None else sent
    rows, computed = NONE, 0
    while True:
        images = pixels(samples[rows]) if len(rows) else None
        sent.append(len(rows))
        reply = service.answer(Question(key, epoch, samples, rows, images)).result(5)
        computed += reply.computed
        if reply.logits_BK is not None:
            return reply._replace(computed=computed)
        assert reply.wanted is not None
        rows = np.union1d(rows, reply.wanted)


def is_right(reply: Reply, samples: NDArray[np.int64], epoch: int = 0) -> bool:
    assert reply.logits_BK is not None
    return np.array_equal(reply.logits_BK, np.stack([samples % 251, samples, np.full(len(samples), epoch)], axis=1))


def test_many_who_ask_the_same_at_once_cause_one_computation() -> None:
    service, network = served(fetch_s=60.0)
    sent = list[int]()
    order = np.random.default_rng(0).permutation(1000)

    def student(number: int) -> int:
        computed = 0
        for epoch in range(2):
            for part in np.array_split(order, 20):
                mine = np.random.default_rng(number).permutation(part)
                reply = ask(service, mine, epoch, sent=sent)
                assert is_right(reply, mine, epoch)
                computed += reply.computed
        return computed

    with ThreadPoolExecutor(8) as students:
        computed = sum(students.map(student, range(8)))
    assert sorted(network.ran) == [(epoch, sample) for epoch in range(2) for sample in range(1000)]
    assert computed == sum(sent) == 2000
    assert service.counts() == {"computed": 2000, "answered": 16000}
    service.close()


def test_batches_that_overlap_bring_each_image_once() -> None:
    service, network = served(fetch_s=60.0)
    sent = list[int]()

    def student(size: int) -> None:
        for begin in range(0, 1000, size):
            mine = np.arange(begin, min(begin + size, 1000))
            assert is_right(ask(service, mine, sent=sent), mine)

    with ThreadPoolExecutor(4) as students:
        list(students.map(student, (30, 41, 64, 100)))
    assert sorted(network.ran) == [(0, sample) for sample in range(1000)]
    assert sum(sent) == 1000
    service.close()


def test_images_that_are_promised_and_do_not_come_are_asked_of_another() -> None:
    service, network = served(fetch_s=0.2)
    lost = service.answer(Question("key", 0, np.arange(10), NONE, None)).result(5)
    assert lost.wanted is not None
    assert lost.wanted.tolist() == list(range(10))
    held = service.answer(Question("key", 0, np.arange(5, 10), NONE, None))
    assert not held.done()
    told = held.result(5)
    assert told.wanted is not None
    assert told.wanted.tolist() == list(range(5))
    assert is_right(ask(service, np.arange(10)), np.arange(10))
    assert len(network.ran) == 10
    service.close()


def test_a_question_that_fails_or_is_given_up_harms_no_other_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    service, _ = served(fetch_s=0.2)
    asks = [Question("key", 0, np.arange(begin, 10), NONE, None) for begin in (0, 4, 5, 6)]
    assert service.answer(asks[0]).result(5).wanted is not None  # and they do not come
    failing, given_up, waits = (service.answer(ask) for ask in asks[1:])
    look = Service._look

    def failing_once(self: Service, held: Any, waiting: Any) -> Reply | None:
        if held.reply is failing:
            raise MemoryError("no room for the answer")
        found = look(self, held, waiting)
        given_up.cancel()  # while its answer is on its way
        return found

    monkeypatch.setattr(Service, "_look", failing_once)
    with pytest.raises(MemoryError):
        failing.result(5)
    assert waits.result(5).wanted is not None
    monkeypatch.undo()
    lost = service.answer(Question("key", 0, np.arange(20, 30), NONE, None)).result(5)
    assert lost.wanted is not None
    assert service.answer(Question("key", 0, np.arange(25, 30), NONE, None)).result(5).wanted is not None  # the watch goes on
    service.close()


def test_images_are_wanted_for_what_is_neither_known_nor_on_its_way() -> None:
    service, network = served()
    ask(service, np.arange(10))
    network.may_run.clear()
    under_way = service.answer(Question("key", 0, np.arange(10, 20), np.arange(10), pixels(np.arange(10, 20))))
    asked = service.answer(Question("key", 0, np.arange(25), NONE, None)).result(5)
    assert asked.wanted is not None
    assert asked.wanted.tolist() == [20, 21, 22, 23, 24]
    waits = service.answer(Question("key", 0, np.arange(20), NONE, None))
    assert not waits.done()
    network.may_run.set()
    assert is_right(waits.result(5), np.arange(20))
    assert is_right(under_way.result(5), np.arange(10, 20))
    service.close()


def test_what_waits_is_computed_together_up_to_a_workers_largest_batch() -> None:
    service, network = served()
    ask(service, np.arange(64))
    network.may_run.clear()
    first = service.answer(Question("key", 0, np.arange(100, 110), np.arange(10), pixels(np.arange(100, 110))))
    waiting = []
    for begin in range(200, 300, 20):
        samples = np.arange(begin, begin + 20)
        waiting.append((samples, service.answer(Question("key", 0, samples, np.arange(20), pixels(samples)))))
    network.may_run.set()
    assert is_right(first.result(5), np.arange(100, 110))
    assert all(is_right(reply.result(5), samples) for samples, reply in waiting)
    assert sum(network.calls[1:]) == 110
    assert len(network.calls) <= 4
    assert max(network.calls) <= 64
    service.close()


def test_the_oldest_answers_make_room_and_are_computed_again() -> None:
    service, _ = served(keep_bytes=100 * ROW_BYTES)
    for begin in (0, 50, 100):
        ask(service, np.arange(begin, begin + 50))
    assert ask(service, np.arange(50, 150)).computed == 0
    assert ask(service, np.arange(50)).computed == 50
    assert is_right(ask(service, np.arange(150)), np.arange(150))
    service.close()


def test_a_batch_larger_than_the_memory_is_answered_all_the_same() -> None:
    service, _ = served(keep_bytes=7 * ROW_BYTES)
    for epoch in range(3):
        assert is_right(ask(service, np.arange(40), epoch), np.arange(40), epoch)
    assert is_right(ask(service, np.arange(20, 60), 2), np.arange(20, 60), 2)
    assert ask(service, np.arange(53, 60), 2).computed == 0
    service.close()


def test_runs_with_a_key_of_their_own_share_the_network_and_no_answer() -> None:
    service, _ = served()
    assert ask(service, np.arange(10)).computed == 10
    assert ask(service, np.arange(10), key="key-trial").computed == 10
    assert ask(service, np.arange(10), key="key-trial").computed == 0
    assert service.answer(Question("other", 0, np.arange(10), NONE, None)).result(5) == Reply()
    service.close()


def test_a_network_that_fails_says_so_to_all_who_wait_and_is_tried_again() -> None:
    service, network = served()
    network.fails = True
    network.may_run.clear()
    samples = np.arange(8)
    first = service.answer(Question("key", 0, samples, np.arange(8), pixels(samples)))
    second = service.answer(Question("key", 0, samples[::-1].copy(), NONE, None))
    network.may_run.set()
    for asked in (first, second):
        with pytest.raises(ArithmeticError, match="the teacher cannot"):
            asked.result(5)
    network.fails = False
    assert is_right(ask(service, samples), samples)
    service.close()


def test_a_teacher_that_cannot_be_opened_says_why_each_time() -> None:
    tries = list[int]()

    def build(settings: dict[str, Any], classes: Sequence[str]) -> Numbered:
        tries.append(1)
        raise FileNotFoundError("no such teacher")

    service = Service(build)
    for number in (1, 2):
        with pytest.raises(FileNotFoundError, match="no such teacher"):
            service.open("key", {}, ("a", "b", "c"), 10).result(5)
        assert len(tries) == number
    service.close()


def test_a_network_that_nobody_asks_for_long_goes_when_another_comes_and_comes_back_when_it_is_asked() -> None:
    opened: list[str] = []

    def build(settings: dict[str, Any], classes: Sequence[str]) -> Numbered:
        opened.append(settings["of"])
        return Numbered()

    service = Service(build, idle_s=0.0)
    for key in ("one", "two"):
        service.open(key, {"of": key}, ("a", "b", "c"), 1000).result(5)
        ask(service, np.arange(10), key=key)
    assert service.answer(Question("one", 0, np.arange(10), NONE, None)).result(5) == Reply()  # to be opened again
    service.open("one", {"of": "one"}, ("a", "b", "c"), 1000).result(5)
    assert ask(service, np.arange(10), key="one").computed == 10
    assert opened == ["one", "two", "one"]


def test_an_empty_memory_takes_next_to_nothing_from_the_system() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    memory = Memory(1 << 30, 1000, 2, np.dtype("float32"))
    assert process.memory_info().rss - before < 1 << 24
    assert memory.page("epoch").in_use == 0
