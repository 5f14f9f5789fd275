"""The failure of a worker is in its rank's file when its exception reaches Ray."""

import contextlib
from pathlib import Path

import pytest
import ray.exceptions

from tests.s3 import S3
from trainables.distributed.group import Group
from trainables.errors import DataError, StageInterruptedError
from trainables.failures import Failure, read_failure
from trainables.object_store.store import ObjectStore
from trainables.rundir import StageDir
from trainables.worker.ray_failures import failure_recorded


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (DataError("no images"), Failure("user", "no images", None, 1)),
        (SystemExit(0), Failure("user", "code of the experiment called sys.exit(0)", None, 1)),
        (ray.exceptions.NodeDiedError("gone"), Failure("lost_peer", "gone", "NodeDiedError", 1)),
    ],
    ids=repr,
)
def test_the_exception_that_leaves_the_context_is_written_and_raised(
    tmp_path: Path, error: BaseException, failure: Failure
) -> None:
    stage = StageDir(tmp_path)
    with pytest.raises(type(error)), failure_recorded(stage, Group(rank=1, world_size=2)):
        raise error
    assert read_failure(stage.error_of(1)) == failure


def test_a_cause_that_is_written_stays_where_another_exception_follows_from_it(tmp_path: Path) -> None:
    stage = StageDir(tmp_path)

    def fail(*errors: Exception) -> str:
        """The message that is written where one exception leaves the context after another."""
        for error in errors:
            with contextlib.suppress(type(error)), failure_recorded(stage, Group()):
                raise error
        failure = read_failure(stage.error_of(0))
        assert failure is not None
        return failure.message

    lost, cause = ray.exceptions.NodeDiedError("gone"), DataError("no images")
    assert fail(lost) == "gone"
    assert fail(cause, KeyError("closed"), lost) == "no images"


def test_a_file_that_cannot_be_written_hides_no_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="no images"), failure_recorded(StageDir(tmp_path / "file"), Group()):
        raise DataError("no images")


def test_a_store_that_does_not_take_the_file_hides_no_exception(s3: S3, tmp_path: Path) -> None:
    store, stage = ObjectStore("s3://bucket", retry_s=0), StageDir(tmp_path)
    s3.refuse(503, 10**6)
    with (
        pytest.raises(StageInterruptedError),
        failure_recorded(stage, Group(), lambda path: store.put(path.name, path)),
    ):
        raise StageInterruptedError("preempted")
    failure = read_failure(stage.error_of(0))
    assert failure is not None
    assert failure.kind == "preempted"
