"""Runs in pipeline stages on a real Ray: a rank is killed, and they end with what one process trains."""

import pytest

from service.config.experiment import load
from tests.integration.conftest import Distill, kill, records, result, wait_until
from tests.trainables.jobs import relative_difference, train
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration

SETS = ["student.model=mlp_large", "precision=fp64", "optim.epochs=6", "train.checkpoint_every=5", "train.log_every=1"]
STAGES = ["scale.num_workers=4", "scale.pipeline_stages=2", "scale.micro_batches=2"]


@pytest.mark.slow
def test_a_run_in_pipeline_stages_survives_a_killed_rank_and_trains_what_one_process_does(
    distill: Distill, ranks: RankPool
) -> None:
    run, alone = distill.runs / "stages", distill.runs / "alone"
    command = distill.start(
        "train", distill.experiment, "--out", run, *(part for each in (*SETS, *STAGES) for part in ("--set", each))
    )
    wait_until(lambda: len(records(run, "step")) > 10, "step 10", command)
    kill([sorted(command.workers(), key=lambda process: process.pid)[-1]])
    wait_until(lambda: records(run, "resume"), "restart", command)
    assert command.end() == 0, command.output
    assert result(run)["status"] == "complete"
    assert "2 × 2 pipeline stages" in command.output
    assert "mlp_large in 2 stages, cut before" in command.output
    settings = load(str(distill.experiment), SETS).experiment.stage("student", RunDir(alone).stage("student").root, {})
    ranks.run(1, train, settings)
    found, expected = (checkpoint.read(RunDir(folder).stage("student").best)[0] for folder in (run, alone))
    names = [name for name in expected if name.startswith("model.")]
    assert relative_difference({name: found[name] for name in names}, {name: expected[name] for name in names}) < 1e-9
    assert [line["step"] for line in records(run, "step")] == list(range(1, 6 * 22 + 1))
    summary = records(run, "summary")[-1]["metrics"]
    assert summary["phase/bubble_ms"] > 0
    assert "rank3/bubble_ms" in summary
    for reader in ("report", "doctor"):
        assert "Traceback" not in distill.run(reader, run)
