"""The memory of a device: how much there is, what a network takes of it, and giving back what a job has left."""

import gc
import math

import torch
from torch import nn

from trainables.device.decode import region_decoder


def memory_bytes(device: torch.device) -> float:
    """Return a GPU's memory in bytes; infinity for the CPU, which others share."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


def parameter_bytes(network: nn.Module) -> int:
    """Return the bytes of all parameters."""
    return sum(parameter.nbytes for parameter in network.parameters())


def release_device(device: torch.device) -> None:
    """Free decoders, pinned and cached blocks that nothing refers to any more, and reset the memory's peaks.

    Before the next job of the same process.
    """
    region_decoder.cache_clear()
    if device.type == "cuda":
        gc.collect()  # a job that failed stands in its exception's frames, which refer to each other
        torch._C._host_emptyCache()  # its public name, in torch.accelerator.memory, is newer than our oldest torch
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
