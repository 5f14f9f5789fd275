"""8: NCCL with a single rank, fp16 with everything that a scaler meets, and how many contexts a worker opens on its GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pynvml
import torch
import torch.distributed as dist

from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.work import Pair, first_device, folder_of, group_of, job_config
from tests.trainables.jobs import relative_difference, train
from trainables.distributed.group import group_arguments
from trainables.worker.hangs.hang_watch import last_collective

DIGITS = Pair("convnet_large", "convnet_small", 8, 10)
STEPS = 50


@contextlib.contextmanager
def process_group(settings: Settings, device: torch.device) -> Iterator[None]:
    """This process's own, as a worker makes it: NCCL on a GPU, Gloo on a CPU."""
    store = dist.HashStore()
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(store=store, rank=0, world_size=1, **group_arguments(backend, device))
    try:
        yield
    finally:
        dist.destroy_process_group()


def collectives(settings: Settings) -> Measured:
    """A barrier, gathered objects, a sum, which torch's flight recorder has, and the second group for CPU tensors."""
    device = first_device(settings)
    backend = "gloo" if device.type == "cpu" else "nccl"
    with process_group(settings, device):
        dist.barrier()
        objects: list[Any] = [None]
        dist.all_gather_object(objects, {"rank": 0})
        total = torch.ones(1000, device=device)
        dist.all_reduce(total)
        last = last_collective()
        cpu_group = dist.new_group(backend="gloo")
        counts = torch.zeros(1, dtype=torch.int64)
        dist.all_gather_into_tensor(counts, torch.tensor([7]), group=cpu_group)
        wrong = [objects != [{"rank": 0}], float(total.sum()) != 1000, counts.tolist() != [7]]
        wrong.append(last is None or last[1] != f"{backend}:all_reduce")
    return {"wrong": sum(wrong), "backend": backend}


def half_precision(settings: Settings) -> Measured:
    """fp16 with two optimizers, clipping and two micro-batches: 50 steps at once, and cut off by a death after a checkpoint."""
    device = first_device(settings)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    sections = {
        "data": {"synthetic_images": 16 * STEPS},
        "optim": {"losses": {"kd": {"lr": 0.005}}, "clip_grad_norm": 1.0, "accumulate": 2},
        "train": {"log_every": 5, "checkpoint_every": 20},
    }
    precision = "fp16"
    with process_group(settings, device):
        whole = train(group_of(device), job_config(settings, DIGITS, 16, precision, sections))
        again = job_config(settings, DIGITS, 16, precision, sections)
        died = train(group_of(device), again, die_after=6)
        resumed = train(group_of(device), again)
    return {
        "died": int(died["died"]),
        "difference": relative_difference(whole["state"], resumed["state"]),
        "steps": whole["progress"].step,
        "loss": next(metrics["epoch/train/loss"] for kind, _, metrics in reversed(whole["calls"]) if kind == "epoch"),
    }


def contexts(settings: Settings) -> Measured:
    """An epoch that fills a cache: how many processes the node's GPUs have, as far as the driver shows them."""
    device = first_device(settings)
    cache = {"cache": str(folder_of(settings, "cache"))}
    config = job_config(settings, DIGITS, 16, "fp32", {"data": {"synthetic_images": 160}, "teacher": cache})
    result = train(group_of(device), config)
    on_gpus = [] if device.type == "cpu" else processes_by_gpu()
    return {
        "processes on GPU 0": len(on_gpus[0]) if on_gpus else 0,
        "GPUs with a process": sum(bool(pids) for pids in on_gpus),
        "steps": result["progress"].step,
    }


def processes_by_gpu() -> list[list[int]]:
    """The processes that compute on each of the node's GPUs, as its driver counts them; a container may hide some."""
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [[process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)] for handle in handles]


CHECK = Check(
    8,
    "NCCL with one rank",
    (
        Piece("8-collectives", collectives, (Expected("wrong", "every collective gives what it should", 0, 0, on_cpu=True),), 1),
        Piece(
            "8-fp16",
            half_precision,
            (
                Expected("died", "the second run was cut off", 1, 1, on_cpu=True),
                Expected("difference", "continued as if it had not been: 0", 0, 0, on_cpu=True),
                Expected("steps", f"{STEPS} steps", STEPS, STEPS, on_cpu=True),
                Expected("loss", "a loss of random labels: recorded"),
            ),
            2,
        ),
        Piece(
            "8-contexts",
            contexts,
            (
                Expected("processes on GPU 0", "one process on its GPU (a container may hide it)", 1, 1, estimate=True),
                Expected("GPUs with a process", "no other GPU is touched", high=1),
            ),
            2,
        ),
    ),
)
