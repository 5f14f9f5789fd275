"""A frozen network whose parameters are divided among ranks: each block's are gathered while it runs, by `fully_shard`.

The parameters are gathered as they are, and each rank runs its own images: on a CPU its outputs have the bits of the whole
network. On a GPU they agree to rounding, since the parameters are not in the memory format of the images.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from trainables.device.memory import parameter_bytes
from trainables.distributed.group import Group
from trainables.models.module_calls import record_calls

LARGEST, SMALLEST = 1 / 64, 1 / 512
"""Parts of a network: a module with more parameters is taken apart, and one with fewer is left to the module around it."""


def shard(network: nn.Module, group: Group, image_size: int) -> None:
    """Leave this rank its part of a network that is on the CPU, on its device; every rank of the group calls it.

    From then on they call the network equally often. A block's parameters are gathered while the one before it runs. Buffers, and
    parameters that several modules have in common, are on every rank.
    """
    process_group = group.process_group or dist.group.WORLD
    assert process_group is not None
    mesh = DeviceMesh.from_group(process_group, group.device.type)
    uses = Counter(parameter for module in network.modules() for parameter in module.parameters(recurse=False))
    shared = {parameter for parameter, count in uses.items() if count > 1}
    for parameter in shared:
        parameter.data = parameter.data.to(group.device)
    blocks = [network.get_submodule(path) for path in block_paths(network, image_size)]
    for block in reversed(blocks):  # those inside others first
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=shared)
    for block, following in pairwise(blocks):
        assert isinstance(block, FSDPModule)
        assert isinstance(following, FSDPModule)
        block.set_modules_to_forward_prefetch([following])


def block_paths(network: nn.Module, image_size: int) -> list[str]:
    """The modules whose parameters are gathered together, in the order in which they begin to run; the first is the network."""
    total_bytes = parameter_bytes(network)
    called = dict.fromkeys(call.path for call in record_calls(network, image_size, training=False))
    chosen = {""}

    def choose(path: str, module: nn.Module) -> int:
        """Choose this module or some inside it; the bytes of its parameters that are in none of them."""
        remaining = parameter_bytes(module)
        if remaining > LARGEST * total_bytes or path not in called:
            remaining = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
            for name, child in module.named_children():
                remaining += choose(f"{path}.{name}" if path else name, child)
        if path not in called or remaining < SMALLEST * total_bytes:
            return remaining
        chosen.add(path)
        return 0

    choose("", network)
    return [path for path in called if path in chosen]
