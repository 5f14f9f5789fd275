import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.s3 import S3, contents
from tests.trainables.jobs import config, equal, train_on_record
from trainables.engine import checkpoint
from trainables.object_store.run_copy import RunCopy
from trainables.object_store.stage_copy import stored_stage
from trainables.rundir import StageDir

URI = "s3://bucket/runs/one"


def train_in(folder: Path, die_after: int | None = None) -> None:
    """Train the stage `student` of the run whose copy is `folder`; a kill after so many checkpoints."""
    num_checkpoints = 0

    def publish_and_die(paths: Sequence[Path], step: int, epoch: float) -> None:
        nonlocal num_checkpoints
        for path in paths:
            publish(path)
        num_checkpoints += 1
        if num_checkpoints == die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    stage = folder / "student"
    settings = config(stage, teacher=None, train={"checkpoint_every": 2, "log_every": 1})
    with stored_stage(RunCopy(URI, folder), stage, is_main=True, barrier=lambda: None) as publish:
        train_on_record(settings, publish_and_die)


def test_a_training_that_is_killed_goes_on_in_another_folder_to_the_bits_of_a_whole_one(s3: S3, tmp_path: Path) -> None:
    first, second, whole = (StageDir(tmp_path / name / "student") for name in ("first", "second", "whole"))
    code = f"from pathlib import Path; from {__name__} import train_in; train_in(Path({str(first.root.parent)!r}), 3)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert sorted(contents(URI)) == ["student/checkpoints/last.safetensors", "student/owner.json"]
    shutil.rmtree(first.root.parent)
    train_in(second.root.parent)
    train_on_record(config(whole.root, teacher=None, train={"checkpoint_every": 2, "log_every": 1}))
    assert equal(*(checkpoint.read(stage.last)[0] for stage in (second, whole)))
