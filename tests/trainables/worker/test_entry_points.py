"""What a worker sets up and writes, alone: an evaluation, and the filling of a cache."""

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from service.commands.evaluate import formatted
from service.runs.event_log import EventLog
from service.runs.events import EventTail, event
from tests.run_log import LocalRecorder, events_of
from tests.trainables.jobs import config as job_config
from tests.trainables.jobs import no_telemetry, write_teacher
from tests.trainables.teachers.cache.test_cached_teacher import settings
from trainables.config import FEATURES_TAP, DataConfig, EvaluateConfig, Measure
from trainables.distributed.group import Group
from trainables.failures import EndedError
from trainables.rundir import StageDir
from trainables.worker import entry_points, torch_settings

ON_A_CPU = "a CPU has no bf16"


@pytest.fixture(autouse=True)
def alone_where_tf32_is_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1; Ray's ranks and this process's CPUs aside. All is as before at the end."""
    log = logging.getLogger("raydistill")
    before, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    for name, value in {"handlers": [], "filters": [], "level": log.level, "propagate": log.propagate}.items():
        monkeypatch.setattr(log, name, value)
    monkeypatch.setattr(entry_points, "current_group", Group)
    for module in (entry_points, torch_settings):
        monkeypatch.setattr(module, "set_up_cpus", lambda *_: None)
    torch.set_float32_matmul_precision("high")
    yield
    for handler in log.handlers:
        handler.close()
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.benchmark = benchmark


def evaluated(tmp_path: Path, precision: str, measure: Measure = "accuracy") -> dict[str, Any]:
    """The result that rank 0 writes."""
    config = EvaluateConfig(
        checkpoint=write_teacher(tmp_path / "model.safetensors"),
        output=str(tmp_path / "output.json"),
        data=DataConfig(path="digits", image_size=8, loader_workers=1),
        precision=precision,
        measure=measure,
    )
    recorder = LocalRecorder(tmp_path)
    with contextlib.closing(recorder.actor):
        entry_points.evaluate_loop_per_worker({"config": config.model_dump(mode="json"), "recorder": recorder})
    return dict(json.loads((tmp_path / "output.json").read_text()))


def test_an_evaluation_has_full_products_and_prints_which_precision_auto_was(tmp_path: Path) -> None:
    accuracy, precision = formatted(evaluated(tmp_path, "auto"))
    assert accuracy.startswith("Acc@1 ")
    assert precision == f"precision auto: fp32: {ON_A_CPU}"
    assert torch.get_float32_matmul_precision() == "highest"


def test_an_evaluation_in_the_precision_that_is_written_prints_none(tmp_path: Path) -> None:
    assert len(formatted(evaluated(tmp_path, "fp64"))) == 1


def test_a_probe_prints_its_accuracy_and_shows_how_many_images_are_done(tmp_path: Path) -> None:
    (line,) = formatted(evaluated(tmp_path, "fp32", "knn"))
    assert line.endswith(f"  k-NN of 20 neighbors on {FEATURES_TAP}  (355 images, 1442 for training, 0 unreadable)")
    shown = list(EventTail(tmp_path / "events.jsonl").new())
    assert [event["metrics"]["max_steps"] for event in shown if event["kind"] == "start"] == [1442, 355]
    (line,) = formatted(evaluated(tmp_path, "fp32", "linear"))
    assert re.search(r"^Acc@1 [\d.]+  Acc@5 [\d.]+  linear probe on \w+, l2 \S+  \(355 images, ", line)


def test_features_are_written_next_to_the_result(tmp_path: Path) -> None:
    assert evaluated(tmp_path, "fp32", "embed")["num_images"] == 1797
    assert pq.read_metadata(tmp_path / "output.parquet").num_rows == 1797


def test_filling_a_cache_has_full_products_and_writes_which_precision_auto_was(tmp_path: Path) -> None:
    config = settings(tmp_path, "fill", precision="auto")
    recorder = LocalRecorder(tmp_path)
    entry_points.fill_loop_per_worker({"config": config.model_dump(mode="json"), "recorder": recorder})
    (result,) = events_of(Path(config.output_dir), "summary")
    assert (result["precision"], result["precision_reason"]) == ("fp32", ON_A_CPU)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_worker_that_was_given_up_and_wakes_in_a_write_leaves_the_newer_attempts_checkpoint_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, fsync = StageDir(tmp_path / "student"), os.fsync

    def fsync_slowly(descriptor: int) -> None:
        fsync(descriptor)
        if stage.last.exists() and ".last.safetensors." in os.readlink(f"/proc/self/fd/{descriptor}"):
            log.append([event("attempt", "student", attempt=2)])  # meanwhile Ray gives this worker up, and others train on
            stage.last.write_bytes(b"the newer attempt's")

    monkeypatch.setattr(os, "fsync", fsync_slowly)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(entry_points, "node_telemetry", lambda *_: contextlib.nullcontext(no_telemetry))
    monkeypatch.setattr(entry_points, "interruption_requests", lambda *_: lambda: None)
    config = job_config(stage.root, optim={"epochs": 3, "lr": 0.05}, teacher=None)
    with contextlib.closing(EventLog(tmp_path / "events.jsonl")) as log:
        log.append([event("attempt", "student", attempt=1)])
        with pytest.raises(EndedError, match="attempt 1 at student was abandoned: a newer one has begun"):
            entry_points.train_stage(config, Group(), LocalRecorder(tmp_path, log, attempt=1))
    assert stage.last.read_bytes() == b"the newer attempt's"
