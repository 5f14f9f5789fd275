"""Ctrl-C ends a run cleanly, and the resumed run ends with the bits of one that was never interrupted."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from service.experiment import load
from service.tracking.spool import Spool
from tests.integration.conftest import Distill, records, result, wait_until
from tests.trainables.jobs import equal, train
from trainables import checkpoint
from trainables.rank_pool import Ranks
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration


def test_an_interrupted_run_is_put_away_and_resumes_to_the_bits_of_a_whole_one(distill: Distill, ranks: Ranks) -> None:
    sets = ["optim.epochs=8", "train.checkpoint_every=5", "train.log_every=1", "scale.num_workers=2"]
    pieces, whole = distill.runs / "pieces", distill.runs / "whole"
    command = distill.start("train", distill.experiment, "--out", pieces, *(part for each in sets for part in ("--set", each)))
    wait_until(lambda: len(records(pieces, "step")) > 40, "step 40", command)
    family = command.family()[1:]
    os.kill(command.process.pid, signal.SIGINT)
    assert command.end(30) == 130
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
    assert result(pieces)["status"] == "interrupted"
    assert f"interrupted; continue with: distill resume {pieces}" in command.output
    assert "Traceback" not in command.output

    distill.run("resume", pieces)
    assert result(pieces)["status"] == "complete"
    # The same job without Ray and without an interruption: the bits are the loop's own.
    job = load(str(distill.experiment), sets).experiment.stage("student", RunDir(whole).stage("student").root, {})
    ranks.run(2, train, job)
    assert equal(*(checkpoint.read(RunDir(run).stage("student").last)[0] for run in (pieces, whole)))
    assert [line["step"] for line in records(pieces, "step")] == list(range(1, 8 * 22 + 1))


@pytest.mark.slow
def test_an_interrupted_sweep_keeps_what_is_finished_and_resumes_to_a_whole_table(distill: Distill) -> None:
    run = distill.runs / "sweep"
    keys = ("sweep.space={data.global_batch_size: [32, 64]}", "optim.epochs=8", "tracking.enabled=true")
    sets = [part for key in keys for part in ("--set", key)]
    command = distill.start("sweep", distill.experiment, "--out", run, *sets)
    first, second = (RunDir(run).trial(trial) for trial in ("000", "001"))
    wait_until(lambda: first.result.exists() and records(second.root, "epoch"), "first epoch of the second trial", command)
    family = command.family()[1:]
    os.kill(command.process.pid, signal.SIGINT)
    assert command.end(30) == 130
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
    found = result(run)
    assert found["status"] == "interrupted"
    assert [row["status"] for row in found["trials"]] == ["ok", "pending"]
    assert Spool(RunDir(run)).runs() == {"sweep": "KILLED", "trial/000": "FINISHED", "trial/001": "KILLED"}
    assert f"interrupted; continue with: distill resume {run}" in command.output
    assert "Traceback" not in command.output
    written = first.result.stat().st_mtime_ns

    said = distill.run("resume", run)
    assert first.result.stat().st_mtime_ns == written
    assert [row["status"] for row in result(run)["trials"]] == ["ok", "ok"]
    assert set(Spool(RunDir(run)).runs().values()) == {"FINISHED"}
    assert "1 trials to run, 1 already decided" in said
    assert [line["epoch"] for line in records(second.root, "epoch")] == list(range(1, 9))
