"""What the blocks of a model cost on a device: forward and backward passes timed apart, memory, bytes over the cuts.

Shapes: S samples of a micro-batch, H=W pixels.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainables.distributed.pipeline.graph import CutPoint, StageModule, split
from trainables.distributed.pipeline.plan import Block, Line

_T = TypeVar("_T")
ROUNDS = 5
"""Of which the median counts. The first one of all, which warms up, does not."""


def measure_blocks(
    model: nn.Module,
    points: Sequence[CutPoint],
    *,
    image_size: int,
    sizes: Sequence[int],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Block]:
    """The blocks between neighbouring cut points, timed in training mode on micro-batches of these sizes, at least two.

    `model` stays as it is.
    """
    blocks = split(copy.deepcopy(model).to(device).train(), [point.module for point in points])
    dtype = next(model.parameters()).dtype
    forward_s: list[dict[int, list[float]]] = [{size: [] for size in sizes} for _ in blocks]
    backward_s: list[dict[int, list[float]]] = [{size: [] for size in sizes} for _ in blocks]
    stored, sent = [0.0 for _ in blocks], [0.0 for _ in blocks]
    for attempt in range(ROUNDS + 1):
        for size in sizes:
            received = torch.randn(size, 3, image_size, image_size, device=device, dtype=dtype)
            for index, block in enumerate(blocks):
                with autocast():
                    passes = _Passes(block, received, device)
                received = passes.sent
                if attempt:
                    forward_s[index][size].append(passes.forward_s)
                    backward_s[index][size].append(passes.backward_s)
                stored[index], sent[index] = passes.stored_bytes / size, received.nbytes / size
    return [
        Block(
            begins_at=point.module if point is not None else "",
            forward=_line(forward_s[index]),
            backward=_line(backward_s[index]),
            parameter_bytes=sum(parameter.nbytes for parameter in blocks[index].parameters()),
            activation_bytes=stored[index],
            output_bytes=sent[index],
        )
        for index, point in enumerate([None, *points])
    ]


class _Passes:
    """One forward and one backward pass of a block."""

    def __init__(self, block: StageModule, received: Tensor, device: torch.device) -> None:
        stored: dict[int, int] = {}
        own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}
        with _count_stored(stored):
            output, self.forward_s = _timed(lambda: block(received), device)
        logits: Tensor = output if isinstance(output, Tensor) else output[0]
        inputs = [tensor for tensor in (received, *block.parameters()) if tensor.requires_grad]
        _, self.backward_s = _timed(
            lambda: torch.autograd.grad(logits, inputs, torch.ones_like(logits), allow_unused=True), device
        )
        self.sent = logits.detach().requires_grad_()
        self.stored_bytes = sum(size for address, size in stored.items() if address not in own)


def forward_line(
    model: nn.Module,
    *,
    image_size: int,
    sizes: Sequence[int],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Line:
    """Seconds of a model's forward pass in eval mode, as of a frozen teacher's."""
    model = copy.deepcopy(model).to(device).eval()
    dtype = next(model.parameters()).dtype
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for attempt in range(ROUNDS + 1):
        for size in sizes:
            images_BCHW = torch.randn(size, 3, image_size, image_size, device=device, dtype=dtype)
            with torch.inference_mode(), autocast():
                _, took_s = _timed(lambda images_BCHW=images_BCHW: model(images_BCHW), device)
            if attempt:
                seconds[size].append(took_s)
    return _line(seconds)


@contextmanager
def _count_stored(storages: dict[int, int]) -> Iterator[None]:
    """Collect the storages, by address, that autograd keeps for the backward pass."""

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _timed(function: Callable[[], _T], device: torch.device) -> tuple[_T, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start_s


def _line(seconds: dict[int, list[float]]) -> Line:
    """The line through the medians; neither its start nor its slope is negative."""
    sizes = np.array(list(seconds), dtype=float)
    medians = np.array([median(times) for times in seconds.values()])
    slope, start = np.polyfit(sizes, medians, 1)
    if slope < 0:
        return Line(float(medians.mean()), 0.0)
    if start < 0:
        return Line(0.0, float((sizes @ medians) / (sizes @ sizes)))
    return Line(float(start), float(slope))
