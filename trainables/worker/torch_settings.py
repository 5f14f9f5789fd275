"""What torch is set to in a process that trains or evaluates."""

import os

import torch

from trainables.config import EvaluateConfig, TrainConfig
from trainables.device.memory import release_device
from trainables.device.numa import run_near
from trainables.device.precision import set_matmul_precision
from trainables.distributed.group import Group


def set_up_torch(config: TrainConfig, group: Group) -> None:
    """Reset this process's CPUs, caches and memory statistics, as if no stage had run in it before."""
    set_up_cpus(config, group)
    set_matmul_precision()
    # The few shapes repeat, so searching for the fastest convolution pays off, but its winner differs from run to run.
    torch.backends.cudnn.benchmark = not config.train.deterministic
    torch.use_deterministic_algorithms(config.train.deterministic)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS, which reads it at its first call
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a write of all memory
    if config.train.compile:  # otherwise an earlier stage's kernels, compiled for other shapes, would be reused
        torch.compiler.reset()
    release_device(group.device)  # drop an earlier stage's peak memory, batches and decoders


def set_up_cpus(config: TrainConfig | EvaluateConfig, group: Group) -> None:
    """Pin this worker to as many CPUs as it reserves, near its GPU, and set torch's number of threads."""
    assert isinstance(config.data.loader_workers, int)
    run_near(group.device, config.scale.cpus_per_worker + config.data.loader_workers)
    torch.set_num_threads(config.scale.cpus_per_worker)
