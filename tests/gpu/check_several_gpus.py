"""11: eight GPUs of one node: who is where, how training scales, and what watching it costs."""

import contextlib
import itertools
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.check_nccl import processes_by_gpu
from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.photos import packed_photos
from tests.gpu.ranks import run_ranks
from tests.gpu.timing import in_rounds, seconds_of
from tests.gpu.work import R34_R18, Pair, Stepper, device_batch, job_config, sized
from tests.trainables.jobs import Recorded, no_telemetry, with_noise_scale
from trainables.config import TrainConfig
from trainables.distributed.group import Group, check_replicas, replica_checksums
from trainables.engine.job import Job
from trainables.engine.train import build, run_job
from trainables.metrics.allreduce_wait import split_waits

NUM_GPUS = 8
PHOTOS = Pair(R34_R18.teacher, R34_R18.student, 224, 10)


def lacks_gpus(settings: Settings) -> str | None:
    """All of them are asked for at once."""
    count = torch.cuda.device_count() if settings.device == "cuda" else NUM_GPUS
    return None if count >= NUM_GPUS else f"{NUM_GPUS} GPUs, and there {'is' if count == 1 else 'are'} {count}"


def world_of(settings: Settings) -> int:
    return 2 if settings.small else NUM_GPUS


def open_here(config: TrainConfig, group: Group) -> Any:
    return contextlib.closing(build(config, group, Recorded(), no_telemetry, stop_early=lambda _: False))


def stepper(job: Job, pair: Pair, batch: int, group: Group) -> Stepper:
    return Stepper(job, device_batch(pair, batch, group.device))


def step_ms(group: Group, config: TrainConfig, pair: Pair, batch: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step of this rank, its waits for the all-reduce by step, and what it takes of the node's GPUs."""
    with open_here(config, group) as job:
        step = stepper(job, pair, batch, group)
        seconds_of(step, 5, group.device)
        if group.world_size > 1:
            dist.barrier()
        taken_s = seconds_of(_watched(job, step, max(1, steps // 6)), steps, group.device)
        pids = processes_by_gpu() if group.device.type == "cuda" and group.is_main else []
        return {"ms": 1e3 * taken_s / steps, "waits": dict(job.metrics.allreduce_wait.by_step), "pids": pids}


def _watched(job: Job, step: Stepper, every: int) -> Any:
    """The step, and as at a log line a look at the clocks of the all-reduce."""
    taken = itertools.count(1)

    def take() -> None:
        step()
        if next(taken) % every == 0:
            job.metrics.allreduce_wait.collect()

    return take


def scaling(settings: Settings, batch: int) -> Measured:
    """Eight ranks beside one, with the same batch a GPU."""
    world_size, pair = world_of(settings), sized(R34_R18, settings)
    batch, steps = (8, 12) if settings.small else (batch, 60)
    sections = {"train": {"warmup_steps": 2}}
    measured = {}
    for ranks in (1, world_size):
        config = job_config(settings, pair, batch * ranks, "bf16", sections)
        measured[ranks] = run_ranks(ranks, settings.device, step_ms, config, pair, batch, steps, timeout_s=200)
    one_ms, all_ms = (max(rank["ms"] for rank in measured[ranks]) for ranks in (1, world_size))
    pids = measured[world_size][0]["pids"]
    return {
        "of linear": one_ms / all_ms,
        "images_per_s": 1e3 * batch * world_size / all_ms,
        "allreduce_ms": split_waits([rank["waits"] for rank in measured[world_size]])[0] or 0.0,
        "most processes on a GPU": max((len(found) for found in pids), default=0),
    }


def noise_ratio(group: Group, config: TrainConfig, pair: Pair, batch: int, rounds: int) -> float:
    """A step with the measurement of the gradient noise by one without, in turns; the median over rounds."""
    with open_here(with_noise_scale(config), group) as job, open_here(config, group) as bare:
        sides = {"with": stepper(job, pair, batch, group), "without": stepper(bare, pair, batch, group)}
        for side in sides.values():
            seconds_of(side, 5, group.device)
        taken = in_rounds(sides, group.device, rounds=rounds, steps=10)
    return statistics.median(ours / peer for ours, peer in zip(taken["with"], taken["without"], strict=True))


def replicas_ms(group: Group, config: TrainConfig, pair: Pair, batch: int, steps: int) -> float:
    """The replicas are checked after each of so many steps; milliseconds a check."""
    spent_s = 0.0
    with open_here(config, group) as job:
        step = stepper(job, pair, batch, group)
        for number in range(steps):
            step()
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)
            began = time.perf_counter()
            check_replicas(replica_checksums(job.train_state.distillation_module, group).tolist(), number)
            spent_s += time.perf_counter() - began
    return 1e3 * spent_s / steps


def watching(settings: Settings) -> Measured:
    """What the noise scale and the check of the replicas cost, and that the replicas stay equal."""
    world_size, pair = world_of(settings), sized(R34_R18, settings)
    batch, rounds, steps = (8, 2, 5) if settings.small else (128, 9, 1000)
    config = job_config(settings, pair, batch * world_size, "bf16")
    ratios = run_ranks(world_size, settings.device, noise_ratio, config, pair, batch, rounds, timeout_s=150)
    small = 8 if settings.small else 32
    config = job_config(settings, pair, small * world_size, "bf16")
    costs = run_ranks(world_size, settings.device, replicas_ms, config, pair, small, steps, timeout_s=250)
    return {"noise ratio": max(ratios), "replicas checked": steps, "ms a check": max(costs)}


def loop_summary(group: Group, config: TrainConfig) -> dict[str, float]:
    with open_here(config, group) as job:
        return run_job(job)


def input_of_all(settings: Settings) -> Measured:
    """All ranks on packed JPEG files, eight loader threads each."""
    world_size, pair = world_of(settings), sized(PHOTOS, settings)
    batch, threads, steps = (8, 2, 2) if settings.small else (256, 8, 60)
    data = {"path": str(packed_photos(settings)), "augment": "crop_flip", "loader_workers": threads}
    sections = {"data": data, "train": {"max_steps": steps, "log_every": 20}}
    config = job_config(settings, pair, batch * world_size, "bf16", sections)
    summaries = run_ranks(world_size, settings.device, loop_summary, config, timeout_s=250)
    return {
        "data_pct": max(summary["data_pct"] for summary in summaries),
        "images_per_s": summaries[0]["images_per_s"],
        "cpu_ms of a step": summaries[0].get("phase/cpu_ms", 0.0),
    }


OF_SCALING = (
    Expected("of linear", "8 GPUs ÷ 8 × 1 ≥ 0.93", low=0.93),
    Expected("allreduce_ms", "all-reduce's wait < 3 ms", high=3),
    Expected("most processes on a GPU", "one process a GPU (a container may hide it)", 1, 1, estimate=True),
)
CHECK = Check(
    11,
    "Several GPUs",
    (
        Piece("11-scaling-256", partial(scaling, batch=256), OF_SCALING, 5, lacks_gpus),
        Piece("11-scaling-128", partial(scaling, batch=128), OF_SCALING, 5, lacks_gpus),
        Piece(
            "11-watching",
            watching,
            (
                Expected("noise ratio", "noise scale on ÷ off < 1.01", high=1.01),
                Expected("replicas checked", "1,000 steps, the replicas equal after each", low=1000),
                Expected("ms a check", "a check of the replicas: recorded"),
            ),
            7,
            lacks_gpus,
        ),
        Piece("11-input", input_of_all, (Expected("data_pct", "8 × 8 loader threads: data's share recorded"),), 5, lacks_gpus),
    ),
)
