"""A frozen network on several devices: a run of its layers on each, one after the other.

Shapes: B images, C channels, H W pixels, K classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainables.distributed.pipeline.choose_cut import balanced_starts
from trainables.distributed.pipeline.cut_points import CutPoint, cut_points
from trainables.distributed.pipeline.stage_module import split
from trainables.errors import ModelError


class SplitNetwork(nn.Module):
    """Images (B, C, H, W) on the first device to logits (B, K) on the last one.

    Copies between GPUs are queued as kernels are: while a batch runs on the second GPU, the first one can have the next batch.
    """

    def __init__(self, parts: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part.to(device) for part, device in zip(parts, devices, strict=True))
        self._devices = tuple(devices)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        output = images_BCHW
        for part, device in zip(self.parts, self._devices, strict=True):
            output = part(output.to(device, non_blocking=True))
        return output


def teacher_cuts(network: nn.Module, image_size: int, num_devices: int) -> list[CutPoint]:
    """Where a teacher can be cut for several devices of an actor.

    Raises ModelError: at too few points, or its forward cannot be traced.
    """
    try:
        points = cut_points(network, image_size)
    except ModelError as error:
        raise ModelError(f"teacher.service_devices {num_devices}: {error}: write 1") from None
    if len(points) < num_devices - 1:
        name = type(network).__name__
        raise ModelError(
            f"teacher.service_devices {num_devices}: {name} can be cut at {len(points)} points: write at most {len(points) + 1}"
        )
    return points


def over_devices(network: nn.Module, image_size: int, devices: Sequence[torch.device]) -> nn.Module:
    """The network itself on one device, or cut over several so that the device with the most parameters has as few as possible.

    Raises ModelError: see `teacher_cuts`.
    """
    if len(devices) == 1:
        return network.to(devices[0])
    cuts = [point.module for point in teacher_cuts(network, image_size, len(devices))]
    sizes = [sum(parameter.nbytes for parameter in part.parameters()) for part in split(network, cuts)]
    _, starts = balanced_starts(len(sizes), len(devices), lambda device, first, end: sum(sizes[first:end]))
    return SplitNetwork(split(network, [cuts[start - 1] for start in starts[1:]]), devices)
