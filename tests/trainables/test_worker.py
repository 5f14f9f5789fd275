"""What a worker does beside the loop, without a Ray."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.trainables.jobs import config
from trainables.distributed import Group
from trainables.rundir import StageDir
from trainables.worker import Reporter, group_arguments


def test_nccl_is_given_the_workers_own_gpu_whatever_its_global_rank() -> None:
    assert group_arguments("nccl", torch.device("cuda:1")) == {"backend": "nccl", "device_id": torch.device("cuda:1")}
    assert group_arguments("gloo", torch.device("cpu")) == {"backend": "gloo"}


def report_until_it_fails(reporter: Reporter) -> None:
    with reporter:
        reporter.report("step", 1, 0.1, {"of_no_kind_json_knows": {1, 2}})  # type: ignore[dict-item]
        deadline = time.monotonic() + 10
        step = 2
        while time.monotonic() < deadline:
            reporter.report("step", step, 0.2, {"other": 1.0})
            step += 1
            time.sleep(0.01)


def test_a_writer_of_records_that_fails_of_anything_stops_the_training_instead_of_losing_what_follows(tmp_path: Path) -> None:
    reporter = Reporter(config(tmp_path, teacher=None), StageDir(tmp_path), Group())
    with pytest.raises(TypeError, match="not JSON serializable"):
        report_until_it_fails(reporter)
