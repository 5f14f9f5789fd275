"""What an evaluation whose workers fail ends with."""

from __future__ import annotations

import pytest

from service.runs.evaluate import evaluation_error
from trainables.errors import ClusterError, DistillError
from trainables.failures import Failure, Kind, WorkersFailedError


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("user", DistillError, "evaluation failed: rank 1: KeyError: why"),
        ("out_of_memory", ClusterError, "evaluation failed: rank 1: why: lower data.global_batch_size or data.loader_workers"),
        ("node_out_of_memory", ClusterError, "rank 1: KeyError: why: lower data.global_batch_size or data.loader_workers"),
        ("worker_died", ClusterError, "evaluation failed: a worker died: why; the same command begins it again"),
    ],
)
def test_the_kind_of_a_failure_is_in_the_error_of_an_evaluation(kind: Kind, error: type[DistillError], words: str) -> None:
    ended = evaluation_error(WorkersFailedError([Failure("lost_peer", "gone", None, 0), Failure(kind, "why", "KeyError", 1)]))
    assert type(ended) is error
    assert str(ended).endswith(words)
