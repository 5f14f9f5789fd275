"""The watch's polling and its time limit, with workers that are not Ray's."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from trainables.metrics.heartbeat import Position
from trainables.worker.hangs import hang_watch
from trainables.worker.hangs.hang_watch import HangWatch, PositionPoller, on_nodes
from trainables.worker.hangs.progress import JobProgress

AT = Position("train", 3, "student")


class Answering:
    """A worker that answers with the next of these, the last of them from then on."""

    def __init__(self, *answers: Position | RayError) -> None:
        self._answers, self.num_requests = answers, 0

    def execute_async(self, function: Any) -> Position | RayError:
        self.num_requests += 1
        return self._answers[min(self.num_requests, len(self._answers)) - 1]


@pytest.fixture(autouse=True)
def _references_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Position | RayError, timeout: float) -> Position:
        if isinstance(reference, RayError):
            raise reference
        return reference

    monkeypatch.setattr(ray, "get", get)


@pytest.mark.parametrize("error", [RayTaskError("state", "", OSError()), ActorUnavailableError("", None)])
def test_a_rank_whose_answer_failed_is_polled_again(error: RayError) -> None:
    poller = PositionPoller({3: Answering(error, AT)})
    assert poller.take() == {}
    assert poller.take() == {3: AT}


@pytest.mark.parametrize("error", [GetTimeoutError(), ActorDiedError()])
def test_a_rank_that_has_not_answered_yet_or_has_died_is_not_polled_again(error: RayError) -> None:
    worker = Answering(error)
    poller = PositionPoller({0: worker})
    assert poller.take() == poller.take() == {}
    assert worker.num_requests == 1


def test_a_node_that_cannot_be_looked_at_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "this"))
    worker = SimpleNamespace(metadata=SimpleNamespace(pid=1, gpu_ids=[0], node_id="this"))
    looked = threading.Event()
    assert on_nodes({0: worker}, lambda processes: sorted(processes), wait_s=60.0) == [[0]]
    assert on_nodes({0: worker}, lambda _: looked.wait(), wait_s=0.1) == []
    looked.set()


def test_a_round_that_fails_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hang_watch, "POLL_S", 0.001)
    monkeypatch.setattr(hang_watch, "on_nodes", lambda *_, **__: [])
    worker, watch = Answering(AT), HangWatch("auto", 8.0)
    rounds = iter([OSError("of a file system"), {0: AT}, {0: Position("train", 4, "student", age_s=9.0)}])

    def take(self: PositionPoller) -> Any:
        if isinstance(answers := next(rounds), OSError):
            raise answers
        return answers

    monkeypatch.setattr(PositionPoller, "take", take)
    watch._watch({0: worker}, threading.Event())
    assert "a look at the workers failed" in caplog.text
    with pytest.raises(ray.train.WorkerGroupError, match="took longer than"):
        watch.after_worker_group_poll_status(None)


def test_the_time_limits_line_has_the_position_of_a_rank_with_a_job() -> None:
    now_s = time.monotonic()
    progress = JobProgress("auto", 2, now_s)
    progress.update(0, None, now_s)
    progress.update(1, Position("train", 4, "student", age_s=9.0), now_s)
    error = HangWatch("auto", 8.0)._end_reason({}, progress, now_s)
    assert str(error) == "took longer than sweep.trial_limit_s; it was in student of step 5"
