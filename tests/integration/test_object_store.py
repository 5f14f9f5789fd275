"""Runs in an object store, on a real Ray: a killed one goes on elsewhere to the bits of a whole one, and others read it."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from service.config.experiment import load
from service.runs.stored.segments import read_segments
from service.runs.stored.stored_runs import run_folder
from tests.integration.conftest import Distill, kill, records, result, wait_until
from tests.run_log import events_of
from tests.s3 import S3, SECRET, contents
from tests.trainables.jobs import equal, train, write_able_teacher
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.object_store.store import ObjectStore
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration
ROOT = "s3://bucket/runs"
SETS = ["optim.epochs=10", "train.checkpoint_every=5", "train.log_every=1", "scale.num_workers=2"]


def options(sets: list[str]) -> list[str]:
    return [part for each in sets for part in ("--set", each)]


def log_of(uri: str) -> bytes | None:
    return read_segments(ObjectStore(uri))


def env_of(s3: S3, copies: Path) -> dict[str, str]:
    return {**s3.env, "RAYDISTILL_COPIES": str(copies)}


@pytest.mark.slow  # without Ray: tests/trainables/object_store/test_training.py
def test_a_run_whose_node_is_gone_with_its_disk_is_resumed_from_the_store_to_the_bits_of_a_whole_one(
    distill: Distill, s3: S3, ranks: RankPool, tmp_path: Path
) -> None:
    env, uri = env_of(s3, tmp_path / "copies"), f"{ROOT}/pieces"
    command = distill.start("train", distill.experiment, "--out", uri, *options(SETS), env=env)
    folder = run_folder(uri)
    wait_until(lambda: b'"kind": "checkpoint"' in (log_of(uri) or b""), "a checkpoint that counts", command)
    wait_until(lambda: len(records(folder, "step")) > 30, "step 30", command)
    kill(command.family())
    there, here = log_of(uri), RunDir(folder).events.read_bytes()
    assert there is not None
    assert here.startswith(there)
    assert len(here) > len(there)  # steps that are lost, which come again
    assert b'"kind": "summary"' not in here
    shutil.rmtree(tmp_path / "copies")

    output = distill.run("resume", uri, env=env)
    assert "waiting 30 s to see whether it still is" in output
    assert f"train tiny in {uri}" in output
    assert f"result: {uri}/result.json" in output
    assert result(folder)["status"] == "complete"
    whole = distill.folder / "whole"
    job = load(str(distill.experiment), SETS).experiment.stage("student", RunDir(whole).stage("student").root, {})
    ranks.run(2, train, job)
    assert equal(*(checkpoint.read(RunDir(run).stage("student").last)[0] for run in (folder, whole)))
    assert [line["step"] for line in records(folder, "step")] == list(range(1, 10 * 22 + 1))
    events = events_of(RunDir(folder).stage("student").root, "start", "step", "epoch", "summary", "checkpoint")
    assert set(Counter((event["kind"], event["step"]) for event in events).values()) == {1}
    assert {name.partition("-")[0] for name in contents(f"{uri}/student/checkpoints")} == {"best", "last"}
    assert len(contents(f"{uri}/student/checkpoints")) == 2  # what was replaced, or the kill had left, is gone
    assert log_of(uri) == RunDir(folder).events.read_bytes()

    shutil.rmtree(tmp_path / "copies")  # a third machine reads
    assert "complete" in distill.run("report", uri, env=env)
    assert f"# {uri}/experiment.yaml" in distill.run("show", uri, env=env)
    assert "tiny" in distill.run("compare", uri, uri, env=env)
    assert "is complete" in distill.run("resume", uri, env=env)
    assert not list(folder.rglob("*.safetensors"))
    for name, content in contents(uri).items():
        assert SECRET not in content, name


@pytest.mark.slow
def test_a_sweep_in_the_store_has_its_rows_there(distill: Distill, s3: S3, tmp_path: Path) -> None:
    env = env_of(s3, tmp_path / "copies") | {"RAYDISTILL_RUNS": ROOT}
    teacher = f"teacher={{model: mlp_large, weights: {write_able_teacher(tmp_path / 'teacher.safetensors')}}}"
    space = "sweep={space: {data.global_batch_size: [32, 64]}, metric: top1_pct, max_concurrent: 1}"
    sets = [teacher, space, "optim.epochs=1", "tracking.enabled=true"]
    output = distill.run("sweep", distill.experiment, *options(sets), env=env)
    assert len(re.findall(r"% top-1 on 355 .* chance is [\d.]+% \(", output)) == 1  # the second trial knows it from the store
    assert "MLflow's store is on this machine" in output
    found = contents(ROOT)
    (name,) = [name for name in found if name.endswith("/result.json") and name.count("/") == 1]
    run = name.removesuffix("/result.json")
    log = log_of(f"{ROOT}/{run}") or b""
    assert all(f'"kind": "summary", "stage": "trials/{trial}/student"'.encode() in log for trial in ("000", "001"))
    assert f"{run}/.mlflow.json" not in found
    assert [name for name in found if name.startswith(f"{run}/teacher-")]
    shutil.rmtree(tmp_path / "copies")
    table = distill.run("report", f"{ROOT}/{run}", env=env)
    assert "000" in table
    assert "001" in table

    uri = f"{ROOT}/{run}/trials/001"
    output = distill.run("evaluate", uri, "--data", "digits", "--set", "scale.num_workers=2", "--runs", ROOT, env=env)
    accuracies = [line["metrics"]["val/top1_pct"] for line in records(run_folder(f"{ROOT}/{run}") / "trials/001", "epoch")]
    assert f"Acc@1 {max(accuracies):.3f}" in output
    assert not [name for name in contents(ROOT) if ".evaluate/" in name]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "digits", "--runs", "s3://nowhere/runs"], "error: s3://nowhere/runs/.probe cannot be written: NO_SUCH_BUCKET"),
        (["report", "s3://bucket/runs/none"], "error: s3://bucket/runs/none holds no run"),
        (["train", "digits", "--runs", f"s3://key:{SECRET}@bucket/runs"], "error: --runs has a password or a key in it"),
        (["cache", "digits", "--runs", ROOT], f"error: --runs {ROOT}: `distill cache` takes no URI here: give a path"),
    ],
)
def test_what_cannot_be_is_one_line(distill: Distill, s3: S3, tmp_path: Path, arguments: list[str], line: str) -> None:
    output = distill.run(*arguments, env=env_of(s3, tmp_path / "copies"), code=2)
    assert output.splitlines()[-1].startswith(line)
    assert SECRET not in output
    assert "Traceback" not in output
