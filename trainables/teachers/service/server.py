"""A teacher that answers several students, and computes each answer once.

An answer is a function of key, epoch and sample: it does not matter who asked, how often, or in which order. So whoever lost an
answer asks again; two who ask for the same image at once wait for the same computation.

Shapes: B samples asked about, R of them whose images come along, n rows of one job, N samples of the training split, K classes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.teachers.service.compute_thread import Computer, Job, Network
from trainables.teachers.service.logits_memory import UNKNOWN, Memory, Page
from trainables.teachers.service.protocol import Question, Reply

KEEP_BYTES = 1 << 30
"""Logits that a service remembers of each network: 20 million images of 10 classes, 267,000 of 1000. Students of a sweep that run
side by side need those of the steps that lie between them."""
FETCH_S = 2.0
"""So long whoever asks for the same images waits for the one who was told to send them; then it is told so itself."""
IDLE_S = 300.0
"""A network that nobody has asked for so long goes, with what it has answered, when another is opened."""
_NONE = np.empty(0, dtype=np.int64)


@dataclass(eq=False)
class _Asked:
    """A question that waits for its last rows."""

    logits_BK: NDArray[Any]
    computed: int
    reply: Future[Reply]
    waits_for: int = 0


@dataclass(eq=False)
class _Computed:
    """Rows that a network is about to answer."""

    page: Page
    samples_n: NDArray[np.int64]
    waiting: list[tuple[_Asked, NDArray[np.intp], NDArray[np.intp]]] = field(default_factory=list)
    """Who, which of its rows, and which of ours they are."""


class _Held(NamedTuple):
    """A question that may have to wait for images which another brings."""

    question: Question
    reply: Future[Reply]
    computed: int = 0
    """Of the images that came along before."""


@dataclass(eq=False)
class _Fetch:
    """Rows whose images somebody was told to send."""

    teacher: _Teacher
    page: Page
    samples_n: NDArray[np.int64]
    until_s: float
    """On the monotonic clock."""
    held: list[_Held] = field(default_factory=list)
    """Who asked for them meanwhile."""


@dataclass(eq=False)
class _Teacher:
    network: Network
    memory: Memory
    asked_s: float
    """When it was asked last, on the monotonic clock."""
    busy: int = 0
    """Computations and fetches that are under way."""


class Service:
    """Networks by key, and what they have answered. Its methods return at once, from any thread."""

    def __init__(
        self, build: Callable[[dict[str, Any], Sequence[str]], Network], *, keep_bytes: int = KEEP_BYTES,
        fetch_s: float = FETCH_S, idle_s: float = IDLE_S,
    ) -> None:  # fmt: skip
        """`build` makes a network from a worker's settings and the classes; of each so many bytes of logits are remembered."""
        self._build, self._keep_bytes, self._fetch_s, self._idle_s = build, keep_bytes, fetch_s, idle_s
        self._lock = threading.Lock()
        self._teachers: dict[str, _Teacher] = {}
        self._opening: dict[str, Future[None]] = {}
        self._under_way: dict[int, _Computed] = {}
        self._fetches: dict[int, _Fetch] = {}
        """Both by the note that stands in a page in the place of their rows; the oldest first."""
        self._computer = Computer()
        self._num_notes, self._num_computed, self._num_answered = 0, 0, 0
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._expire, name="fetches", daemon=True)
        self._watch.start()

    def open(self, key: str, settings: dict[str, Any], classes: Sequence[str], num_samples: int) -> Future[None]:
        """Have the network of `key`, for samples 0 … N-1; done when it is there. After a failure the next call tries again."""
        name = network_of(key)
        with self._lock:
            if name in self._opening and not _failed(self._opening[name]):
                return self._opening[name]
            done = self._opening[name] = Future()
        threading.Thread(target=self._open, args=(name, settings, classes, num_samples, done), daemon=True).start()
        return done

    def answer(self, question: Question) -> Future[Reply]:
        """See `Reply`. Rows that are not known need their images; those that come along are computed in any case."""
        reply: Future[Reply] = Future()
        self._answer([_Held(question, reply)])
        return reply

    def _answer(self, questions: Sequence[_Held]) -> None:
        """Look at questions, and at those whose images come along with them, and give the answers that are there."""
        ready, waiting = list[tuple[Future[Reply], Reply]](), list(questions)
        with self._lock:
            while waiting:
                held = waiting.pop()
                if (found := self._look(held, waiting)) is not None:
                    ready.append((held.reply, found))
        for reply, found in ready:
            _give(reply, found)

    def _look(self, held: _Held, waiting: list[_Held]) -> Reply | None:
        """What can be replied now; None: later. Others who waited for what came along are `waiting` to be looked at again."""
        question = held.question
        teacher = self._teachers.get(network_of(question.key))
        if teacher is None:
            return Reply()
        samples_B = question.samples_B
        teacher.asked_s = time.monotonic()
        page = teacher.memory.page((question.key, question.epoch))
        computed = held.computed + self._take_on(teacher, page, question, waiting)
        at_B = page.places_N[samples_B]
        wanted_B = at_B == UNKNOWN
        if wanted_B.any():
            self._fetch(teacher, page, samples_B[wanted_B])
            return Reply(wanted=np.flatnonzero(wanted_B), computed=computed)
        if fetched := self._fetched(at_B):
            asks_alone = question._replace(rows_R=_NONE, images_RHWC=None)
            self._fetches[fetched[0]].held.append(_Held(asks_alone, held.reply, computed))
            return None
        asked = _Asked(np.empty((len(samples_B), teacher.network.num_classes), teacher.network.dtype), computed, held.reply)
        known_B = at_B > UNKNOWN
        asked.logits_BK[known_B] = teacher.memory.read(at_B[known_B])
        for note in np.unique(at_B[~known_B]).tolist():
            other, rows = self._under_way[note], np.flatnonzero(at_B == note)
            order = np.argsort(other.samples_n)
            other.waiting.append((asked, rows, order[np.searchsorted(other.samples_n, samples_B[rows], sorter=order)]))
            asked.waits_for += 1
        self._num_answered += len(samples_B)
        return None if asked.waits_for else Reply(asked.logits_BK, computed=computed)

    def counts(self) -> dict[str, int]:
        """Images that the networks ran for, and images that were answered, since the service began."""
        with self._lock:
            return {"computed": self._num_computed, "answered": self._num_answered}

    def close(self) -> None:
        """End the threads; what waits is not answered any more."""
        self._closed.set()
        self._watch.join()
        self._computer.close()

    def _open(self, name: str, settings: dict[str, Any], classes: Sequence[str], num_samples: int, done: Future[None]) -> None:
        try:
            network = self._build(settings, classes)
            memory = Memory(self._keep_bytes, num_samples, network.num_classes, network.dtype)
        except BaseException as error:
            done.set_exception(error)
            return
        with self._lock:
            self._let_go()
            self._teachers[name] = _Teacher(network, memory, time.monotonic())
        done.set_result(None)

    def _let_go(self) -> None:
        """Of teachers whom nobody has asked for long: trials of other seeds have networks and answers of their own."""
        since_s = time.monotonic() - self._idle_s
        for name in [name for name, teacher in self._teachers.items() if teacher.asked_s < since_s and not teacher.busy]:
            del self._teachers[name], self._opening[name]

    def _fetch(self, teacher: _Teacher, page: Page, samples_n: NDArray[np.int64]) -> None:
        """Somebody is told to send these images."""
        note = self._note()
        teacher.busy += 1
        self._fetches[note] = _Fetch(teacher, page, samples_n, time.monotonic() + self._fetch_s)
        teacher.memory.promise(page, samples_n, note)

    def _expire(self) -> None:
        """The thread that ends fetches whose images do not come: who waits for them is told to send them.

        What begins while it sleeps ends after that at the earliest: nobody needs to wake it.
        """
        pause_s = self._fetch_s
        while not self._closed.wait(pause_s):
            with self._lock:
                now_s = time.monotonic()
                late = [note for note, fetch in self._fetches.items() if fetch.until_s <= now_s]
                held = [one for note in late for one in self._end_fetch(note)]
                oldest = next(iter(self._fetches.values()), None)
                pause_s = oldest.until_s - now_s if oldest else self._fetch_s
            for one in held:
                try:
                    self._answer([one])
                except Exception as error:  # theirs alone: the thread watches for all
                    if not one.reply.done():
                        one.reply.set_exception(error)

    def _fetched(self, places: NDArray[np.int64]) -> list[int]:
        """The notes in these places by which images are on their way."""
        return [note for note in np.unique(places[places < UNKNOWN]).tolist() if note in self._fetches]

    def _take_on(self, teacher: _Teacher, page: Page, question: Question, waiting: list[_Held]) -> int:
        """Queue those of the images that came along whose answer is unknown; returns how many."""
        if question.images_RHWC is None:
            return 0
        at_R = page.places_N[question.samples_B[question.rows_R]]
        fetched = self._fetched(at_R)
        new_R = (at_R == UNKNOWN) | np.isin(at_R, fetched)
        if not new_R.any():
            return 0
        samples_n, note = question.samples_B[question.rows_R[new_R]], self._note()
        images_nHWC = question.images_RHWC if new_R.all() else question.images_RHWC[new_R]
        self._under_way[note] = _Computed(page, samples_n)
        teacher.busy += 1
        teacher.memory.promise(page, samples_n, note)
        answered, failed = partial(self._deliver, teacher, note), partial(self._fail, teacher, note)
        self._computer.add(Job(teacher.network, question.epoch, samples_n, images_nHWC, answered, failed))
        for told in fetched:
            waiting += self._end_fetch(told)
        return len(samples_n)

    def _end_fetch(self, note: int) -> list[_Held]:
        """Nobody is told any more to send these images; those of them that have not come are unknown. Returns who waited."""
        fetch = self._fetches.pop(note)
        fetch.teacher.busy -= 1
        left_n = fetch.samples_n[fetch.page.places_N[fetch.samples_n] == note]
        fetch.teacher.memory.forget(fetch.page, left_n)
        return fetch.held

    def _note(self) -> int:
        self._num_notes += 1
        return UNKNOWN - self._num_notes

    def _deliver(self, teacher: _Teacher, note: int, logits_nK: NDArray[Any]) -> None:
        complete = list[_Asked]()
        with self._lock:
            ours = self._under_way.pop(note)
            teacher.busy -= 1
            self._num_computed += len(logits_nK)
            teacher.memory.write(ours.page, ours.samples_n, logits_nK)
            for asked, rows, mine in ours.waiting:
                asked.logits_BK[rows] = logits_nK[mine]
                asked.waits_for -= 1
                if not asked.waits_for:
                    complete.append(asked)
        for asked in complete:
            _give(asked.reply, Reply(asked.logits_BK, computed=asked.computed))

    def _fail(self, teacher: _Teacher, note: int, error: Exception) -> None:
        """Whoever waits for these learns why; asked again, they are computed again."""
        with self._lock:
            if (ours := self._under_way.pop(note, None)) is None:
                return  # it was delivered, as far as it went
            teacher.busy -= 1
            teacher.memory.forget(ours.page, ours.samples_n)
        for asked, *_ in ours.waiting:
            if not asked.reply.done():
                asked.reply.set_exception(error)


def network_of(key: str) -> str:
    """The key's part that names the network: what follows a `-` keeps the answers of one run to itself."""
    return key.partition("-")[0]


def _give(reply: Future[Reply], found: Reply) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits any more, or an error came first
        reply.set_result(found)


def _failed(opening: Future[None]) -> bool:
    return opening.done() and opening.exception() is not None
