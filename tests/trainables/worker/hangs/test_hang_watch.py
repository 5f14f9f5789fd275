"""The watch's polling and its time limit, with workers that are not Ray's."""

import time
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from trainables.metrics.heartbeat import Position
from trainables.worker.hangs.hang_watch import HangWatch, PositionPoller
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


def test_the_time_limits_line_has_the_position_of_a_rank_with_a_job() -> None:
    now_s = time.monotonic()
    progress = JobProgress("auto", 2, now_s)
    progress.update(0, None, now_s)
    progress.update(1, Position("train", 4, "student", age_s=9.0), now_s)
    error = HangWatch("auto", 8.0)._end_reason({}, progress, now_s)
    assert str(error) == "took longer than sweep.trial_limit_s; it was in student of step 5"
