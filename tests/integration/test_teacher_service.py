"""A teacher's service on a real cluster: a sweep's students share it, and its death costs them time alone."""

import re
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.integration.conftest import Distill, RayCluster, family, kill, records, result, title, wait_until
from tests.trainables.jobs import relative_difference, write_teacher
from trainables.rundir import RunDir

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

TRIALS, EPOCHS, IMAGES = ("000", "001"), 30, 22 * 64


def actors(cluster: RayCluster) -> list[psutil.Process]:
    """The processes of the service."""
    return [process for node in cluster.nodes for process in family(node.process) if "ray::TeacherActor" in title(process)]


def model_of(checkpoint: Path) -> dict[str, Tensor]:
    """The student in it."""
    return {name: tensor for name, tensor in load_file(checkpoint).items() if name.startswith("model.")}


def test_students_of_a_sweep_share_a_teacher_whose_death_changes_none_of_them(
    distill: Distill, cluster: RayCluster, tmp_path: Path
) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors")
    settings = (
        "--set",
        f"teacher={{model: mlp_large, weights: {weights}, service: 1, service_devices: 2}}",
        "--set",
        "student.model=mlp_small",
        "--set",
        "precision=fp64",
        "--set",
        "data.augment=pad_crop_flip",
        "--set",
        f"optim.epochs={EPOCHS}",
        "--set",
        "sweep={space: {optim.lr: [0.05, 0.02]}, max_concurrent: 2, metric: top1_pct}",
    )
    undisturbed, disturbed = distill.runs / "undisturbed", distill.runs / "disturbed"

    output = distill.run("sweep", distill.experiment, "--out", undisturbed, *settings, env=cluster.env)
    assert [row["status"] for row in result(undisturbed)["trials"]] == ["ok", "ok"]
    epochs = [records(RunDir(undisturbed).trial(trial).root, "epoch") for trial in TRIALS]
    ran_for = [[record["metrics"]["epoch/train/teacher_images"] for record in of_trial] for of_trial in epochs]
    assert [sum(counts) for counts in zip(*ran_for, strict=True)] == [IMAGES] * EPOCHS
    counted = re.search(r"mlp_large ran for ([\d,]+) images,\s+and\s+logits\s+of\s+([\d,]+)\s+were\s+returned", output)
    assert counted is not None, output
    assert [int(count.replace(",", "")) for count in counted.groups()] == [IMAGES * EPOCHS, 2 * IMAGES * EPOCHS]
    assert not actors(cluster)

    command = distill.start("sweep", distill.experiment, "--out", disturbed, *settings, env=cluster.env)
    first = RunDir(disturbed).trial(TRIALS[0]).root
    wait_until(lambda: len(records(first, "epoch")) >= 2, "the second epoch", command)
    kill(actors(cluster))
    assert command.end() == 0, command.output
    rows = result(disturbed)["trials"]
    assert [(row["status"], row["restarts"]) for row in rows] == [("ok", 0), ("ok", 0)]
    assert any(
        "an actor is gone" in RunDir(disturbed).trial(trial).stage("student").log.read_text() for trial in TRIALS
    )  # the blow did not miss
    for trial in TRIALS:
        ours, theirs = (model_of(RunDir(run).trial(trial).stage("student").last) for run in (disturbed, undisturbed))
        assert relative_difference(ours, theirs) < 1e-9
