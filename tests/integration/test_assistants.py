"""Teacher → assistant → assistant → student on a real Ray: killed in the middle, gone on with, and shared by a sweep's trials."""

import pytest

from service.config.experiment import read_resolved
from tests.integration.conftest import Distill, kill, records, result, wait_until
from tests.trainables.jobs import equal, train, write_teacher
from tests.trainables.methods import own_methods
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.methods.init_stage import with_init_stage
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration

SETS = (
    "teacher={model: mlp_large, epochs: 1}",
    "assistants=[{model: convnet_small, epochs: 4}, {model: mlp_small}]",
    "optim.epochs=1",
    "train.log_every=1",
    "train.checkpoint_every=5",
)
NAMES = ("teacher", "assistant1", "assistant2", "student")
INIT = (
    f"distill={{method: [kd, '{own_methods.__file__}:InitStage'], options: {{InitStage: {{init_epochs: 2}}}}}}",
    "optim.lr=0.005",
)


def options(*sets: str) -> list[str]:
    return [part for each in (*SETS, *sets) for part in ("--set", each)]


@pytest.mark.slow
def test_a_chain_that_is_killed_goes_on_at_the_very_stage_and_to_the_bits_of_a_whole_one(
    distill: Distill, ranks: RankPool
) -> None:
    """The teacher is one of other classes, which is fine-tuned first."""
    run, alone = distill.runs / "chain", distill.runs / "alone"
    given = f"teacher.weights={write_teacher(distill.runs / 'nine.safetensors', num_classes=9)}"
    command = distill.start("train", distill.experiment, "--out", run, *options(given, "teacher.lr_head=0.1", *INIT))
    wait_until(lambda: len(records(run, "step", "assistant1-init")) > 30, "step 30 of the first init stage", command)
    kill(command.family())
    command = distill.start("resume", run)
    wait_until(lambda: len(records(run, "step", "assistant1")) > 40, "step 40 of the first assistant", command)
    kill(command.family())
    assert [line["step"] for line in records(run, "step", "assistant1-init")] == list(range(1, 2 * 22 + 1))
    summaries = records(run, "summary", "teacher")
    assert not records(run, "summary", "assistant1")

    output = distill.run("resume", run)
    assert records(run, "summary", "teacher") == summaries
    assert len(records(run, "attempt", "teacher")) == 1
    assert [(stage["stage"], stage["model"], stage["status"]) for stage in result(run)["stages"]] == [
        ("teacher", "mlp_large", "ok"),
        ("assistant1-init", "convnet_small", "ok"),
        ("assistant1", "convnet_small", "ok"),
        ("assistant2-init", "mlp_small", "ok"),
        ("assistant2", "mlp_small", "ok"),
        ("student-init", "convnet_small", "ok"),
        ("student", "convnet_small", "ok"),
    ]
    assert all(name in output for name in NAMES)
    assert [line["step"] for line in records(run, "step", "assistant1")] == list(range(1, 4 * 22 + 1))
    assert "train/distill_loss" in records(run, "step", "assistant2")[0]["metrics"]
    # The same stages without Ray and without an interruption, each taught by the one before it.
    experiment, weights = read_resolved(RunDir(run).experiment).experiment, None
    assert experiment.teacher is not None
    assert experiment.teacher.finetune is True
    for name in NAMES:
        stage = RunDir(alone).stage(name)
        for job in with_init_stage(experiment.stage(name, stage.root, {}, weights)):
            ranks.run(1, train, job)
        assert equal(*(checkpoint.read(RunDir(folder).stage(name).best)[0] for folder in (run, alone))), name
        weights = str(stage.best)
    assert (run / "report.html").stat().st_size > 0


@pytest.mark.slow
def test_the_trials_of_a_sweep_share_the_assistants(distill: Distill) -> None:
    run = distill.runs / "sweep"
    space = "sweep.space={optim.lr: [0.05, 0.1]}"
    distill.run("sweep", distill.experiment, "--out", run, *options("assistants=[{model: mlp_small}]", space))
    found = result(run)
    assert [stage["stage"] for stage in found["stages"]] == ["teacher", "assistant1"]
    assert [row["status"] for row in found["trials"]] == ["ok", "ok"]
    for trial in ("000", "001"):
        folder = RunDir(run).trial(trial).root
        assert not any(RunDir(folder).stage(name).root.exists() for name in ("teacher", "assistant1"))
        assert "train/distill_loss" in records(folder, "step")[0]["metrics"]
