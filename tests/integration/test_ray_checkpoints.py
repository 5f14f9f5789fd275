"""Why checkpoints are not Ray Train's own: a kill of its controller while it writes the list of valid ones ends the run for good.

If this fails, Ray replaces its list atomically: try its checkpoints again (CONTRIBUTING.md, "Measured and left out").
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray.train
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from service.cluster.connect import set_ray_environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def storage(*, dies: bool) -> PyFileSystem:
    """A local folder. If `dies`, the process that opens Ray's list of checkpoints to write it a third time is killed."""

    class Handler(FSSpecHandler):  # local, since workers cannot import the tests
        lists_written = 0

        def open_output_stream(self, path: str, metadata: Any) -> Any:
            stream = super().open_output_stream(path, metadata)
            self.lists_written += path.endswith("checkpoint_manager_snapshot.json")
            if dies and self.lists_written == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return stream

    return PyFileSystem(Handler(LocalFileSystem()))


def fit(folder: Path, *, dies: bool) -> None:
    """Train a run of this folder and name, or continue it: each of five steps reports a checkpoint."""

    def train() -> None:
        for step in range(5):
            with tempfile.TemporaryDirectory() as own:
                Path(own, "state").write_text(f"whole {step}")
                ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(own))

    config = RunConfig("run", str(folder), storage_filesystem=storage(dies=dies), checkpoint_config=CheckpointConfig(2))
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=1), run_config=config).fit()


def test_a_killed_controller_of_ray_train_leaves_whole_checkpoints_that_no_run_resumes_from(tmp_path: Path) -> None:
    set_ray_environment()
    ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        with pytest.raises(ray.exceptions.ActorDiedError, match="worker process has died"):
            fit(tmp_path, dies=True)
        assert {path.read_text() for path in tmp_path.glob("run/checkpoint_*/state")} >= {"whole 0", "whole 1", "whole 2"}
        with pytest.raises(ray.exceptions.ActorDiedError, match="CheckpointManagerInitializationError"):
            fit(tmp_path, dies=False)
    finally:
        ray.shutdown()
