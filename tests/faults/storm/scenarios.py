"""What the Ray tier runs: commands, their faults, and what each may not lose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from service.runs.run_log import RunLog
from tests.faults.storm import ray_tier as ray
from tests.faults.storm.oracle import cache_losses, delivery_losses, sent_numbers, stage_losses, status_of
from tests.faults.storm.ray_tier import RUN, Scenario
from tests.run_log import events_of
from tests.trainables.jobs import relative_difference, write_able_teacher
from trainables.engine import checkpoint
from trainables.rundir import RunDir, StageDir

TRAINING = {
    "optim.epochs": "40",
    "train.checkpoint_every": "20",
    "train.log_every": "1",
    "scale.num_workers": "2",
    "scale.max_failures": "20",
    "scale.hang_after_s": "30",
    "tracking": "{enabled: true, log_model: false}",
}


def scenarios(folder: Path, experiment: Path) -> list[Scenario]:
    """All of a local Ray. `folder`: for the teachers of those that need one."""
    weights = write_able_teacher(folder / "teacher.safetensors")
    kinds, student = (*ray.OF_RUNS, *ray.OF_LOCAL_RAY), {"student.model": "mlp_small", "precision": "fp64"}
    served = TRAINING | student | {"teacher": f"{{model: mlp_large, weights: {weights}, service: 1}}"}
    filled = {"teacher": f"{{model: mlp_large, weights: {weights}, cache: {RUN}-logits, cache_epochs: 30}}"} | student
    trained = TRAINING | {"scale.num_workers": "1", "sweep": "{space: {optim.lr: [0.05, 0.02]}, metric: top1_pct}"}
    space = "{scale.num_workers: [1, 2], data.global_batch_size: [64, 128]}"
    guided = TRAINING | {"sweep": f"{{policy: guided, steps: 12, space: {space}}}"}
    augmented = {"data.augment": "pad_crop_flip", "scale.num_workers": "2", "optim.epochs": "30", "scale.max_failures": "20"}
    return [
        Scenario("train on Ray", ("train", experiment), TRAINING, kinds, train_losses),
        Scenario("sweep", ("sweep", experiment), trained, kinds, sweep_losses),
        Scenario("guided sweep", ("sweep", experiment), guided, (*ray.OF_RUNS, ray.RAYLET_KILLED), guided_losses),
        Scenario("teacher service", ("train", experiment), served, (ray.ACTOR_KILLED, *ray.OF_RUNS), served_losses),
        Scenario("cache on Ray", ("cache", experiment), filled | augmented, kinds, filled_losses, has_out=False),
    ]


def cluster_scenarios(runs: Path, experiment: Path) -> list[Scenario]:
    """All of a Ray of three nodes."""
    submit = ("submit", "--follow", "train", experiment, "--runs", runs)
    kinds, of_jobs = (*ray.OF_RUNS, *ray.OF_CLUSTERS), (ray.JOB_KILLED, ray.WORKER_KILLED, *ray.OF_CLUSTERS)
    return [
        Scenario("train on three nodes", ("train", experiment), TRAINING, kinds, train_losses, on_cluster=True),
        Scenario("submit", submit, TRAINING, of_jobs, train_losses, on_cluster=True),
    ]


def mlflow_losses(run: Path, key: str, stage: StageDir) -> Iterator[str]:
    """Of one stage's records in the runs root's own store."""
    name = str(stage.root.relative_to(run))
    yield from delivery_losses(run.parent / "mlflow.db", RunDir(run), key, sent_numbers(RunDir(run), name))


def train_losses(whole: Path, run: Path) -> Iterator[str]:
    """Of a run: its student, bit for bit, and its records."""
    if status_of(RunDir(run)).get("status") != "complete":
        yield f"its status is {status_of(RunDir(run)).get('status')}"
        return
    student = RunDir(run).stage("student")
    yield from stage_losses(RunDir(whole).stage("student"), student)
    yield from mlflow_losses(run, "train", student)


def sweep_losses(whole: Path, run: Path) -> Iterator[str]:
    """Of a sweep of trainings: a row each, and of each trial what a run has."""
    expected, found = status_of(RunDir(whole)), status_of(RunDir(run))
    rows = [[(row["id"], row["params"], row["status"]) for row in each.get("trials", [])] for each in (expected, found)]
    if found.get("status") != "complete" or rows[0] != rows[1]:
        yield f"{found.get('status')} with the rows {rows[1]} for {rows[0]}"
        return
    for trial, _, _ in rows[0]:
        student = RunDir(run).trial(trial).stage("student")
        yield from stage_losses(RunDir(whole).trial(trial).stage("student"), student)
        yield from mlflow_losses(run, f"trial/{trial}", student)


def guided_losses(whole: Path, run: Path) -> Iterator[str]:
    """Of a guided sweep, whose measurements are never the same twice: it has a best point, and each record once."""
    found = status_of(RunDir(run))
    rows = found.get("trials", [])
    if found.get("status") != "complete" or not found.get("best") or len(rows) != len(status_of(RunDir(whole))["trials"]):
        yield f"{found.get('status')}, best {found.get('best')}, {len(rows)} rows"
    if other := [(row["id"], row["status"], row.get("reason")) for row in rows if row["status"] not in ("ok", "untested")]:
        yield f"points that are neither measured nor untested: {other[:3]}"
    log = RunLog(RunDir(run).events)
    for stage in log.stages:
        steps = [line["step"] for line in log.of_stage(stage, "step")]
        if len(steps) != len(set(steps)):
            yield f"{stage} has a step twice"


def filled_losses(whole: Path, run: Path) -> Iterator[str]:
    """Of a cache: every row."""
    yield from cache_losses(*(each.with_name(f"{each.name}-logits") for each in (whole, run)))


def served_losses(whole: Path, run: Path) -> Iterator[str]:
    """Of a run with a teacher's service, whose batches depend on who asks when: the student to 1e-9, each record once."""
    expected, found = (_weights(RunDir(each).stage("student").last) for each in (whole, run))
    if (difference := relative_difference(found, expected)) > 1e-9:
        yield f"the student differs by {difference:.1e}"
    steps = [[line["step"] for line in events_of(each / "student", "step")] for each in (whole, run)]
    if steps[0] != steps[1]:
        yield f"{len(steps[1])} steps are on record, and {len(steps[0])} of an undisturbed run"
    yield from mlflow_losses(run, "train", RunDir(run).stage("student"))


def _weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in checkpoint.read(path)[0].items() if name.startswith("model.")}
