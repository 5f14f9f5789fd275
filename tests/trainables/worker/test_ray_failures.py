"""A worker's exception reaches the driver with its cause, whatever it was and whatever it is pickled with."""

import contextlib
import pickle

import pytest
import ray.exceptions
import torch

from trainables.errors import DataError, StageInterruptedError
from trainables.failures import EndedError, Failure
from trainables.worker.ray_failures import failures_typed, ray_failure


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (DataError("no images"), Failure("user", "no images", None, 1)),
        (SystemExit(0), Failure("user", "the experiment's code called sys.exit(0)", None, 1)),
        (ray.exceptions.NodeDiedError("gone"), Failure("lost_peer", "gone", "NodeDiedError", 1)),
        (StageInterruptedError("preempted"), Failure("preempted", str(StageInterruptedError("preempted")), None, 1)),
        (torch.OutOfMemoryError("CUDA out of memory"), Failure("out_of_memory", "CUDA out of memory", "OutOfMemoryError", 1)),
    ],
    ids=repr,
)
def test_the_exception_that_leaves_the_context_carries_its_cause(error: BaseException, failure: Failure) -> None:
    with pytest.raises(EndedError) as ended, failures_typed(1):
        raise error
    assert ended.value.__cause__ is error
    assert ray_failure(pickle.loads(pickle.dumps(ended.value)), 1, "worker_died") == failure


def test_a_cause_stays_where_another_exception_follows_from_it() -> None:
    def close() -> None:
        raise ray.exceptions.NodeDiedError("gone")

    def work() -> None:
        with failures_typed(0), contextlib.ExitStack() as stack:
            stack.callback(close)
            stack.enter_context(failures_typed(0))
            raise DataError("no images")

    with pytest.raises(EndedError, match="no images"):
        work()
