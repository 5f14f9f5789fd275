"""What a worker does beside the loop, without a Ray."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import ray.train
import ray.train.torch
import torch

from tests.trainables.jobs import config
from trainables.distributed.group import Group
from trainables.errors import DataError
from trainables.failures import WorkersFailedError
from trainables.rundir import StageDir
from trainables.worker.entry_points import EpochReports, Reporter, fit, group_arguments


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


@pytest.mark.parametrize("lost", [ray.exceptions.ActorDiedError(), ray.exceptions.ActorUnavailableError("gone", None)], ids=repr)
def test_a_worker_that_dies_while_its_training_is_launched_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    def launch() -> None:
        raise ray.train.ControllerError(lost)

    monkeypatch.setattr(ray.train.torch, "TorchTrainer", lambda *_, **__: SimpleNamespace(fit=launch))
    with pytest.raises(WorkersFailedError) as ended:
        fit(config(tmp_path, teacher=None), use_gpu=False, loader_workers=1, storage=tmp_path, name="x")
    assert [failure.kind for failure in ended.value.failures] == ["worker_died"]


def report_two(reports: EpochReports) -> None:
    with reports:
        reports.put({"epoch": 1})
        assert reports._idle.wait(10)
        reports.put({"epoch": 2})


@pytest.mark.parametrize("kind", [DataError, SystemExit])
def test_whatever_ends_an_epochs_report_reaches_the_training_thread(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def refuse(_: object) -> None:
        raise kind("no")

    monkeypatch.setattr(ray.train, "report", refuse)
    with pytest.raises(kind):
        report_two(EpochReports(Group()))
