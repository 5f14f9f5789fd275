"""Measure what each block of a model costs on a device: forward and backward time, parameters and activations.

Only one block is on the device at a time, so a model that does not fit the device can be measured too.
"""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainables.distributed.pipeline.graph import split
from trainables.errors import ModelError
from trainables.failures import is_single_value, kind_of

ROUNDS = 5
"""The fastest round counts, since other load and the choice of kernels in the first round only add time."""


@dataclass(frozen=True)
class Block:
    """The layers between two neighboring cut points. Times and activations are for one micro-batch."""

    begins_at: str
    """The module at the cut before the block; empty for the first block."""
    forward_s: float
    backward_s: float
    parameter_bytes: int
    activation_bytes: int
    """Stored from the forward to the backward pass."""


def measure_blocks(
    model: nn.Module,
    cuts: Sequence[str],
    images_BCHW: Tensor,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    training: bool = True,
) -> list[Block]:
    """Measure the blocks between `cuts` on one micro-batch `images_BCHW`, on its device. `model` is not changed.

    Without `training`, run only the forward pass, as for a frozen teacher.

    Raises ModelError: a block does not fit the device, or its batch norm refuses a single image.
    """
    model = copy.deepcopy(model).train(training)
    device, received, found = images_BCHW.device, images_BCHW, list[Block]()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode(not training):
        for name, part in zip(["", *cuts], split(model, cuts) if cuts else [model], strict=True):
            try:
                block, received = _measure(name, part.to(device), received, autocast, training)
            except Exception as error:
                if kind_of(error) != "out_of_memory" and not (isinstance(error, ValueError) and is_single_value(error)):
                    raise
                raise ModelError(
                    f"the part of the model that begins at {name or 'the images'} does not run on {len(images_BCHW)} images of a"
                    f" micro-batch: write another scale.micro_batches ({(str(error) or type(error).__name__).splitlines()[0]})"
                ) from None
            part.cpu()
            found.append(block)
    return found


def _measure(
    name: str, part: nn.Module, received: Tensor, autocast: Callable[[], AbstractContextManager[None]], training: bool
) -> tuple[Block, Tensor]:
    """Return a block's costs and its output."""
    received = received.detach().requires_grad_(training and bool(name))
    stored_bytes = dict[int, int]()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*part.parameters(), *part.buffers())}

    def store(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            stored_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # detach: a node that saves its own output is a cycle, which would leak the model's copy

    def forward() -> Tensor:
        with autocast():
            output = part(received)
        return output if isinstance(output, Tensor) else output[0]

    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        output = forward()
    times_s = []
    for _ in range(ROUNDS):
        start_s = _now_s(received.device)
        output = forward()
        forward_end_s = _now_s(received.device)
        if training:
            output.backward(torch.ones_like(output))
        times_s.append((forward_end_s - start_s, _now_s(received.device) - forward_end_s))
    part.zero_grad()
    forward_s, backward_s = map(min, zip(*times_s, strict=True))
    parameter_bytes = sum(parameter.nbytes for parameter in part.parameters())
    return Block(name, forward_s, backward_s if training else 0.0, parameter_bytes, sum(stored_bytes.values())), output


def _now_s(device: torch.device) -> float:
    """Return the time once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
