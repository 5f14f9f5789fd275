"""10: the whole product with Ray: where a worker is, how a training ends, the guided search beside its own grid; and, on eight
GPUs, one worker of them out of memory.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.runs.run_log import read_log
from tests.gpu import ray_methods
from tests.gpu.check_nccl import processes_by_gpu
from tests.gpu.check_several_gpus import lacks_gpus, world_of
from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.photos import packed_photos
from tests.gpu.work import R34_R18, folder_of, job_config, sized
from trainables.rundir import RunDir

ROOT = Path(__file__).parents[2]


def lacks_ray(settings: Settings) -> str | None:
    return None if importlib.util.find_spec("ray") else "Ray is not installed"


def lacks_ray_or_gpus(settings: Settings) -> str | None:
    return lacks_ray(settings) or lacks_gpus(settings)


def base_keys(settings: Settings, folder: Path, batch: int) -> dict[str, Any]:
    """Keys of every command here: r34 → r18, or the twin, on synthetic images, nothing sent to MLflow."""
    pair = sized(R34_R18, settings)
    teacher = job_config(settings, pair, batch, "fp32").teacher
    assert teacher is not None
    return {
        "data.path": "synthetic",
        "data.image_size": pair.image_size,
        "data.synthetic_classes": pair.num_classes,
        "data.synthetic_images": 50 * batch,
        "data.global_batch_size": batch,
        "data.augment": "none",
        "data.loader_workers": 1 if settings.small else 4,
        "teacher.model": pair.teacher,
        "teacher.weights": teacher.weights,
        "student.model": pair.student,
        "precision": "fp32" if settings.small else "bf16",
        "tracking.enabled": False,
    }


def distill(command: str, out: Path, keys: dict[str, Any], during: Callable[[], None] = lambda: None) -> tuple[int, float]:
    """Run a `distill` command to its end. Returns its exit code and the seconds that it took."""
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "service", command, "imagenet_r34_r18", "--out", str(out), *sets],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"COLUMNS": "200"},
    ) as process:
        while process.poll() is None:
            during()
            time.sleep(0.5)
    return process.returncode, time.monotonic() - began


def fresh(settings: Settings, name: str) -> Path:
    """A folder for a run that nothing of an earlier one is in."""
    folder = folder_of(settings, name)
    return folder / f"run-{len(list(folder.iterdir()))}"


def train_once(settings: Settings) -> Measured:
    """`distill train` of 100 steps: the worker's device and LOCAL_RANK, processes on the GPU, and how soon it ends."""
    steps, batch = (10, 20) if settings.small else (100, 256)
    notes, out = folder_of(settings, "where"), fresh(settings, "ray-train")
    keys = base_keys(settings, out, batch) | {
        "distill.method": ["kd", f"{ray_methods.__file__}:Where"],
        "distill.options": {"Where": {"folder": str(notes)}},
        "train.max_steps": steps,
        "train.log_every": 10,
    }
    most = 0

    def look() -> None:
        nonlocal most
        if not settings.small:
            most = max([most, *(len(pids) for pids in processes_by_gpu())])

    code, seconds = distill("train", out, keys, look)
    ended_s = time.time()
    lines = read_log(RunDir(out)).of_stage("student", "step")
    noted = json.loads((notes / "0.json").read_text())
    return {
        "exit code": code,
        "device": noted["device"],
        "local rank": int(noted["local_rank"]),
        "processes on a GPU": most,
        "ends after_s": ended_s - lines[-1]["time_ms"] / 1e3,
        "seconds": seconds,
    }


def search(settings: Settings) -> Measured:
    """A sweep of batch × precision × loader threads on packed photos: the guided policy beside the whole grid."""
    out = fresh(settings, "ray-sweep")
    batches = [8, 16] if settings.small else [64, 256, 512]
    space: dict[str, list[Any]] = {"data.global_batch_size": batches, "data.loader_workers": [1, 2] if settings.small else [2, 8]}
    space |= {} if settings.small else {"precision": ["fp32", "bf16"]}
    photos = {"data.path": str(packed_photos(settings)), "data.augment": "crop_flip", "sweep.space": space}
    keys = base_keys(settings, out, batches[0]) | photos | {"sweep.steps": 8 if settings.small else 30}
    grid_code, grid_s = distill("sweep", out / "grid", keys)
    guided_code, guided_s = distill("sweep", out / "guided", keys | {"sweep.policy": "guided"})
    rows = {policy: json.loads(RunDir(out / policy).result.read_text()) for policy in ("grid", "guided")}
    speeds = {json.dumps(row["params"], sort_keys=True): row["metrics"].get("images_per_s", 0) for row in rows["grid"]["trials"]}
    best = next(row for row in rows["guided"]["trials"] if row["id"] == rows["guided"]["best"]["id"])
    return {
        "exit codes": grid_code + guided_code,
        "of best": speeds[json.dumps(best["params"], sort_keys=True)] / max(speeds.values()),
        "points tried": sum(row["status"] == "ok" for row in rows["guided"]["trials"]) / len(speeds),
        "time of grid's": guided_s / grid_s,
    }


def one_rank_full(settings: Settings) -> Measured:
    """Rank 3 of eight out of memory: how soon the command ends, what it says, and whether the next one trains."""
    world_size, batch = world_of(settings), 32
    full = 1 if settings.small else 3
    keys = base_keys(settings, settings.folder, batch * world_size) | {
        "scale.num_workers": world_size,
        "train.max_steps": 20,
        "train.log_every": 2,
    }
    broken = keys | {
        "distill.method": ["kd", f"{ray_methods.__file__}:Full"],
        "distill.options": {"Full": {"rank": full}},
        "scale.max_failures": 0,
    }
    out = fresh(settings, "ray-full")
    code, _ = distill("train", out, broken)
    ended_s = time.time()
    log = read_log(RunDir(out))
    lines = log.of_stage("student", "start", "step")
    outcome = log.of_stage("student", "stage_ended")[-1]["outcome"]
    next_code, _ = distill("train", fresh(settings, "ray-full"), keys)
    return {
        "exit code": code,
        "kind": outcome["failure"],
        "not oom": int(outcome["failure"] != "out_of_memory"),
        "rank": int(rank[1]) if (rank := re.match(r"rank (\d+):", outcome["reason"])) else -1,
        "ends after_s": ended_s - lines[-1]["time_ms"] / 1e3,
        "next exit code": next_code,
    }


CHECK = Check(
    10,
    "With Ray",
    (
        Piece(
            "10-train",
            train_once,
            (
                Expected("exit code", "the command ends well", 0, 0, on_cpu=True),
                Expected("device", "the worker's device: recorded"),
                Expected("local rank", "LOCAL_RANK 0", 0, 0, on_cpu=True),
                Expected("processes on a GPU", "one process on its GPU (a container may hide it)", 1, 1, estimate=True),
                Expected("ends after_s", "ends within 10 s of its last step", high=10),
            ),
            4,
            lacks_ray,
        ),
        Piece(
            "10-search",
            search,
            (
                Expected("exit codes", "both sweeps end well", 0, 0, on_cpu=True),
                Expected("of best", "guided finds a point within 3 % of the grid's best", low=0.97),
                Expected("points tried", "share of the grid that it tried: recorded"),
            ),
            9,
            lacks_ray,
        ),
        Piece(
            "10-one-rank-full",
            one_rank_full,
            (
                Expected("not oom", "reads out_of_memory", 0, 0, on_cpu=True),
                Expected("ends after_s", "within 40 s", high=40),
                Expected("next exit code", "the next command trains", 0, 0, on_cpu=True),
            ),
            6,
            lacks_ray_or_gpus,
        ),
    ),
)
