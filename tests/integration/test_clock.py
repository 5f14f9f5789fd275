"""A run's wall time is accounted for, and each of its numbers is on record once: with a real Ray and a real MLflow store."""

import os
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from statistics import median

import pytest

from service.report import timeline
from service.runs.run_directory import reopen
from tests.integration.conftest import Distill, records, result
from tests.run_log import events_of
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration

EPOCHS = 8
SLACK_S = 0.3
"""What two busy cores may add to a part of a run."""
TRAINED = [f"optim.epochs={EPOCHS}", "tracking.enabled=true", "tracking.log_model=false", "scale.num_workers=2"]

KILL_AFTER_RENAME = """
import os, signal
from pathlib import Path

replace, renamed, marker = os.replace, [], Path({marker!r})

def replace_and_die(source, target, **options):
    replace(source, target, **options)
    if Path(target).name == "last.safetensors":
        renamed.append(target)
        if len(renamed) == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace_and_die
"""


def options(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def sent_twice(runs: Path) -> list[tuple[str, int]]:
    """Numbers of a stage that the store has more than once for a step."""
    with closing(sqlite3.connect(runs / "mlflow.db")) as store:
        rows = store.execute("SELECT run_uuid, key, step FROM metrics").fetchall()
    assert rows
    return [(key, step) for (_, key, step), count in Counter(rows).items() if count > 1]


def recorded_twice(run: Path) -> list[tuple[str, int]]:
    """Numbers that a stage's file has more than once for a step."""
    lines = events_of(RunDir(run).stage("student").root, "start", "step", "epoch", "summary")
    counts = Counter((name, line["step"]) for line in lines for name in line["metrics"])
    return [pair for pair, count in counts.items() if count > 1]


@pytest.mark.slow
def test_epochs_do_not_wait_for_ray_and_the_parts_of_a_run_are_its_wall_time(distill: Distill) -> None:
    run = distill.runs / "clock"
    distill.run("train", distill.experiment, "--out", run, *options(*TRAINED, "train.evaluate_every=3"))
    (stage,) = reopen(run)[2].stages
    parts = timeline.parts(stage)
    accounted_s = sum(seconds for name, seconds in parts.items() if name != "interruptions")
    assert accounted_s == pytest.approx(stage.seconds, rel=0.02, abs=SLACK_S)
    assert result(run)["seconds"] - stage.seconds > 0
    epochs = [record["metrics"] for record in records(run, "epoch")]
    # Ray's controller looks for a report every half second, and an epoch takes a fifth of that: waiting adds 0.4 s.
    assert median(epoch["epoch/other_s"] for epoch in epochs[2:]) < SLACK_S
    assert ["val/top1_pct" in epoch for epoch in epochs] == [number in (3, 6, 8) for number in range(1, EPOCHS + 1)]
    assert recorded_twice(run) == sent_twice(distill.runs) == []


@pytest.mark.slow
def test_a_rank_0_that_dies_between_a_checkpoint_and_its_record_loses_no_record(distill: Distill, tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(KILL_AFTER_RENAME.format(marker=str(tmp_path / "killed")))
    path = os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))
    run = distill.runs / "killed"
    distill.run("train", distill.experiment, "--out", run, *options(*TRAINED), env={"PYTHONPATH": path})
    assert (tmp_path / "killed").exists()
    (stage,) = result(run)["stages"]
    assert (stage["status"], stage["restarts"]) == ("ok", 1)
    assert [record["epoch"] for record in records(run, "epoch")] == [*range(1, EPOCHS + 1)]
    assert (len(records(run, "start")), len(records(run, "resume"))) == (1, 1)
    assert recorded_twice(run) == sent_twice(distill.runs) == []
    with closing(sqlite3.connect(distill.runs / "mlflow.db")) as store:
        steps = [step for (step,) in store.execute("SELECT step FROM metrics WHERE key = 'top1_pct' ORDER BY step")]
    assert steps == [record["step"] for record in records(run, "epoch")]


@pytest.mark.slow
def test_asha_stops_a_trial_at_an_evaluated_epoch_before_it_has_run_ahead(distill: Distill) -> None:
    run = distill.runs / "asha"
    sweep = [
        "sweep.policy=asha",
        "sweep.metric=top1_pct",
        "sweep.num_samples=4",
        "sweep.grace_epochs=2",
        "sweep.reduction_factor=2",
    ]
    space = 'sweep.space={"optim.lr": [0.05, 0.000001]}'
    epochs = ["optim.epochs=30", "train.evaluate_every=2", "seed=1"]  # of this seed the better trial is the first
    distill.run("sweep", distill.experiment, "--out", run, *options(*sweep, space, *epochs))
    rows = result(run)["trials"]
    assert {row["status"] for row in rows} == {"ok", "stopped"}
    for row in rows:
        found = [record["metrics"] for record in records(run / "trials" / row["id"], "epoch")]
        assert ["val/top1_pct" in epoch for epoch in found] == [number % 2 == 0 for number in range(1, len(found) + 1)]
        if row["status"] == "stopped":
            assert len(found) < 30
            assert row["metrics"]["wall_s"] == pytest.approx(sum(epoch["epoch/wall_s"] for epoch in found))
            assert row["metrics"]["top1_pct"] == [epoch["val/top1_pct"] for epoch in found if "val/top1_pct" in epoch][-1]
