"""The watch's polling and its time limit, with workers that are not Ray's."""

import threading
from typing import Any

import pytest
import ray
import ray.train
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from trainables.metrics.heartbeat import Position
from trainables.worker.hangs import hang_watch
from trainables.worker.hangs.hang_watch import HangWatch, update
from trainables.worker.hangs.progress import JobProgress

AT = Position("train", 3, "student")


class Answering:
    """A worker that answers where it is."""

    def __init__(self, answer: Position) -> None:
        self._answer, self.num_requests = answer, 0

    def execute_async(self, function: Any) -> Position:
        self.num_requests += 1
        return self._answer


@pytest.fixture(autouse=True)
def _references_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Position | RayError, timeout: float) -> Position:
        if isinstance(reference, RayError):
            raise reference
        return reference

    monkeypatch.setattr(ray, "get", get)


@pytest.mark.parametrize("error", [RayTaskError("state", "", OSError()), ActorUnavailableError("", None)])
def test_a_rank_whose_answer_failed_is_asked_again(error: RayError) -> None:
    workers, progress = {0: Answering(AT)}, JobProgress("auto", 1, 0.0)
    pending: dict[int, Any] = {0: error}
    update(progress, workers, pending)
    assert progress.ranks[0].position == Position()
    update(progress, workers, pending)
    assert progress.ranks[0].position == AT


def test_a_rank_that_has_not_answered_yet_is_not_asked_again() -> None:
    worker = Answering(AT)
    update(JobProgress("auto", 1, 0.0), {0: worker}, {0: GetTimeoutError()})
    assert worker.num_requests == 0


def test_a_round_that_fails_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hang_watch, "POLL_S", 0.001)
    monkeypatch.setattr(hang_watch, "on_nodes", lambda *_: {})
    late = Position("train", 4, "student", age_s=9.0)
    watch, rounds = HangWatch("auto", 8.0), iter([OSError("of a file system"), None, late])

    def update(progress: JobProgress, workers: Any, pending: Any) -> None:
        if isinstance(answer := next(rounds), OSError):
            raise answer
        progress.update(0, answer, 1.0)  # None: a rank without a job

    monkeypatch.setattr(hang_watch, "update", update)
    watch._watch({0: Answering(AT)}, JobProgress("auto", 1, 0.0), threading.Event())
    assert "a look at the workers failed" in caplog.text
    with pytest.raises(ray.train.WorkerGroupError, match=r"took longer than sweep\.trial_limit_s; it was in student of step 5"):
        watch.after_worker_group_poll_status(None)
