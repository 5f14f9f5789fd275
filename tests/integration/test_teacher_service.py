"""A teacher's service on a real cluster: students of a sweep share it, learn what a teacher of their own would teach, and its
death costs them time alone.
"""

import re
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor

from service.config.experiment import load
from tests.integration.conftest import Distill, RayCluster, family, kill, records, result, title, wait_until
from tests.trainables.jobs import relative_difference, train, write_able_teacher
from trainables.distributed.rank_pool import RankPool
from trainables.rundir import RunDir

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

TRIALS, RATES, EPOCHS, IMAGES, VALIDATION = ("000", "001"), (0.05, 0.02), 30, 22 * 64, 355


def actors(cluster: RayCluster) -> list[psutil.Process]:
    """The processes of the service."""
    return [process for node in cluster.nodes for process in family(node.process) if "ray::TeacherActor" in title(process)]


def model_of(checkpoint: Path) -> dict[str, Tensor]:
    """The student in it."""
    return {name: tensor for name, tensor in load_file(checkpoint).items() if name.startswith("model.")}


def test_students_of_a_sweep_share_a_teacher_whose_death_changes_none_of_them(
    distill: Distill, cluster: RayCluster, ranks: RankPool, tmp_path: Path
) -> None:
    teacher = f"model: mlp_large, weights: {write_able_teacher(tmp_path / 'teacher.safetensors')}"
    sets = ["student.model=mlp_small", "precision=fp64", "data.augment=pad_crop_flip", f"optim.epochs={EPOCHS}"]
    service = f"teacher={{{teacher}, service: 1}}"
    sweep = f"sweep={{space: {{optim.lr: {list(RATES)}}}, max_concurrent: 2, metric: top1_pct}}"
    settings = [part for each in (*sets, service, sweep) for part in ("--set", each)]
    undisturbed, disturbed = distill.runs / "undisturbed", distill.runs / "disturbed"

    output = distill.run("sweep", distill.experiment, "--out", undisturbed, *settings, env=cluster.env)
    assert [row["status"] for row in result(undisturbed)["trials"]] == ["ok", "ok"]
    epochs = [records(RunDir(undisturbed).trial(trial).root, "epoch") for trial in TRIALS]
    ran_for = [[record["metrics"]["epoch/train/teacher_images"] for record in of_trial] for of_trial in epochs]
    assert [sum(counts) for counts in zip(*ran_for, strict=True)] == [IMAGES] * EPOCHS
    counted = re.search(r"mlp_large ran for ([\d,]+) images,\s+and\s+its\s+outputs\s+for\s+([\d,]+)\s+were\s+returned", output)
    assert counted is not None, output
    computed, returned = (int(count.replace(",", "")) for count in counted.groups())
    assert computed == IMAGES * EPOCHS + VALIDATION
    assert returned - 2 * IMAGES * EPOCHS in (VALIDATION, 2 * VALIDATION)  # trials that start at once both measure the teacher
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
    for trial, rate in zip(TRIALS, RATES, strict=True):
        alone = RunDir(distill.runs / f"alone-{trial}").stage("student")
        own_teacher = load(str(distill.experiment), [*sets, f"teacher={{{teacher}}}", f"optim.lr={rate}"]).experiment
        ranks.run(1, train, own_teacher.stage("student", alone.root, {}))
        for run in (undisturbed, disturbed):
            trained = model_of(RunDir(run).trial(trial).stage("student").last)
            assert relative_difference(trained, model_of(alone.last)) < 1e-9
