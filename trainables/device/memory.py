"""The memory of a device, and what a network takes of it."""

import math

import torch
from torch import nn


def memory_bytes(device: torch.device) -> float:
    """Of a GPU; of the CPU, which is shared with all else, without end."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


def parameter_bytes(network: nn.Module) -> int:
    """Of all its parameters."""
    return sum(parameter.nbytes for parameter in network.parameters())
