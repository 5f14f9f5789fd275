"""The records of a job: a failure to write one reaches the training thread."""

import time
from pathlib import Path

import pytest
import ray.train

from tests.trainables.jobs import config
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.rundir import StageDir, read_lines
from trainables.worker.reporter import Reporter


def report_until_it_fails(folder: Path) -> None:
    with DiskWriter() as disk:
        reporter = Reporter(config(folder, teacher=None), StageDir(folder), Group(), disk)
        reporter.report("step", 1, 0.1, {"of_no_kind_json_knows": {1, 2}})  # type: ignore[dict-item]
        deadline = time.monotonic() + 10
        step = 2
        while time.monotonic() < deadline:
            reporter.report("step", step, 0.2, {"other": 1.0})
            step += 1
            time.sleep(0.01)


def test_a_writer_of_records_that_fails_of_anything_stops_the_training_instead_of_losing_what_follows(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        report_until_it_fails(tmp_path)


def test_the_record_of_an_epoch_is_where_the_driver_reads_it_before_ray_may_end_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[str] = []
    monkeypatch.setattr(ray.train, "report", lambda metrics: published.append(f"epoch {metrics['epoch']:g} reported"))
    settings = config(tmp_path, teacher=None).model_copy(update={"report_each_epoch": True})

    def publish(path: Path) -> None:
        published.append(f"epoch {read_lines(path)[-1]['epoch']:g} published")

    with DiskWriter() as disk:
        reporter = Reporter(settings, StageDir(tmp_path), Group(), disk, publish)
        for epoch in (1, 2):
            reporter.report("epoch", 10 * epoch, float(epoch), {"val/top1_pct": 50.0})
    assert published == ["epoch 1 published", "epoch 1 reported", "epoch 2 published", "epoch 2 reported"]
