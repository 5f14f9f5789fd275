"""The failure of a worker is in `error.json` when its exception reaches Ray."""

from pathlib import Path

import pytest
import ray.exceptions

from trainables.distributed.group import Group
from trainables.errors import DataError
from trainables.failures import Failure, read_failure
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
    assert read_failure(stage.error) == failure


def test_a_file_that_cannot_be_written_hides_no_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="no images"), failure_recorded(StageDir(tmp_path / "file"), Group()):
        raise DataError("no images")
