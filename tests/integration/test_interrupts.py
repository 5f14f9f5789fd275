"""Ctrl-C ends a run cleanly, and the resumed run ends with the bits of one that was never interrupted."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.integration.conftest import Distill, records, result, wait_until
from tests.trainables.jobs import equal
from trainables import checkpoint
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration


def test_an_interrupted_run_is_put_away_and_resumes_to_the_same_bits(distill: Distill) -> None:
    sets = ("--set", "optim.epochs=30", "--set", "train.checkpoint_every=5", "--set", "train.log_every=1")
    whole, pieces = distill.runs / "whole", distill.runs / "pieces"
    command = distill.start("train", distill.experiment, "--out", pieces, *sets)
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
    distill.run("train", distill.experiment, "--out", whole, *sets)
    assert result(pieces)["status"] == "complete"
    tensors = [checkpoint.read(RunDir(run).stage("student").last)[0] for run in (whole, pieces)]
    assert equal(*tensors)
    steps = [line["step"] for line in records(pieces, "step")]
    assert steps == list(range(1, len(records(whole, "step")) + 1))
