"""What the blocks of a model cost on a device: forward and backward passes timed apart, memory, bytes over the cuts.

The whole model runs, block after block, with a time stamp at each cut point; on the way back each tensor that crosses one sets
a stamp when its gradient is known. How the blocks compare is taken from the shortest time of each, since what else a machine does
only adds to some. All are multiplied by one factor, so that together they take what the whole model usually takes, and not what
it would take if nothing ever came between: a training step has as many interruptions.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainables.distributed.pipeline.costs import Block, PassTime
from trainables.distributed.pipeline.stage_module import split
from trainables.errors import ModelError
from trainables.failures import kind_of

ROUNDS = 5
"""One more, the first, warms up."""
BUDGET_S = 20.0
"""After so long no larger size is tried and no further round begun."""


@dataclass(frozen=True)
class Conditions:
    """Under which a model runs."""

    image_size: int
    device: torch.device
    precision: str
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    layout: torch.memory_format = torch.contiguous_format


@dataclass(frozen=True)
class _PassTimes:
    """Seconds of one forward and one backward pass in each block."""

    forward_s: list[float]
    backward_s: list[float]

    @property
    def total_s(self) -> float:
        return sum(self.forward_s) + sum(self.backward_s)


class Measurement(NamedTuple):
    """A model's blocks, timed."""

    blocks: list[Block]
    spread: float
    """The median round's time by the shortest's, of the size of micro-batches where that is most: 1 on a quiet machine."""


def measure_blocks(
    model: nn.Module, cuts: Sequence[str], conditions: Conditions, sizes: Sequence[int], *, training: bool = True
) -> Measurement:
    """The blocks between these cut points, timed on micro-batches of these sizes. `model` stays as it is.

    Without `training`: as a frozen teacher runs, forward only. Sizes that the device's memory or a batch norm refuses, and larger
    ones after `BUDGET_S`, are left out. Raises ModelError: the model runs at none of the sizes, or does not fit the device.
    """
    what = "the whole model" if training else "the whole teacher, sharded or not,"
    model = _on_device(model, conditions, what).train(training)
    parts: Sequence[nn.Module] = split(model, cuts) if cuts else [model]
    run = _Run(parts, conditions, training=training)
    with torch.random.fork_rng([conditions.device] if conditions.device.type == "cuda" else []):
        passes = _rounds(run, sizes, what)
    shortest = {size: _shortest(found) for size, found in passes.items()}
    totals_s = [[each.total_s for each in found] for found in passes.values()]
    spread = max(median(times_s) / min(times_s) for times_s in totals_s)
    usual = median([each.total_s / shortest[size].total_s for size, found in passes.items() for each in found])
    blocks = [
        Block(
            begins_at=name,
            forward=PassTime(tuple(shortest), tuple(usual * each.forward_s[index] for each in shortest.values())),
            backward=PassTime(tuple(shortest), tuple(usual * each.backward_s[index] for each in shortest.values())),
            parameter_bytes=sum(parameter.nbytes for parameter in parts[index].parameters()),
            activation_bytes=run.stored_bytes[index],
            output_bytes=run.sent_bytes[index],
        )
        for index, name in enumerate(["", *cuts])
    ]
    return Measurement(blocks, spread)


def _on_device(model: nn.Module, conditions: Conditions, what: str) -> nn.Module:
    try:
        return copy.deepcopy(model).to(conditions.device).to(memory_format=conditions.layout)
    except Exception as error:
        if kind_of(error) != "out_of_memory":
            raise
        raise _does_not_fit(what, error) from None


def _does_not_fit(what: str, error: Exception) -> ModelError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ModelError(
        f"the parts of a model are timed on one device, and {what} does not fit it with its micro-batches: write"
        f" scale.cut and scale.micro_batches by hand ({reason})"
    )


def _shortest(passes: Sequence[_PassTimes]) -> _PassTimes:
    """Of each block."""
    forward_s, backward_s = zip(*((each.forward_s, each.backward_s) for each in passes), strict=True)
    return _PassTimes(
        [min(times_s) for times_s in zip(*forward_s, strict=True)], [min(times_s) for times_s in zip(*backward_s, strict=True)]
    )


def _rounds(run: _Run, sizes: Sequence[int], what: str) -> dict[int, list[_PassTimes]]:
    """By size, in rising order; each round has all sizes, so that the machine's ups and downs meet all of them."""
    start_s = time.perf_counter()
    found: dict[int, list[_PassTimes]] = {}
    refused: ModelError | None = None
    for size in sorted(set(sizes)):
        if found and time.perf_counter() - start_s > BUDGET_S:
            break
        try:
            run.count_bytes(size)
            run.passes(size)
        except ValueError as error:  # batch norm's, of a single value per channel
            sizes_tried = ", ".join(map(str, sizes))
            refused = ModelError(f"the model does not run on micro-batches of {sizes_tried}: {str(error).splitlines()[0]}")
        except Exception as error:
            if kind_of(error) != "out_of_memory":
                raise
            refused = _does_not_fit(what, error)
        else:
            found[size] = []
    if refused is not None and not found:
        raise refused
    for number in range(ROUNDS):
        if number and time.perf_counter() - start_s > BUDGET_S:
            break
        for size, passes in found.items():
            passes.append(run.passes(size))
    return found


class _Run:
    """Passes of a model's blocks, one after the other."""

    def __init__(self, blocks: Sequence[nn.Module], conditions: Conditions, *, training: bool) -> None:
        self._blocks, self._conditions, self._training = blocks, conditions, training
        parameters = [parameter for block in blocks for parameter in block.parameters()]
        buffers = [buffer for block in blocks for buffer in block.buffers()]
        self._dtype = parameters[0].dtype
        self._own = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, *buffers)}
        self.stored_bytes = [0.0 for _ in blocks]
        """Of one sample, that a block is the first to store for its backward pass; without one, the most at a time in it."""
        self.sent_bytes = [0.0 for _ in blocks]
        """Of one sample, to the block after it."""

    def passes(self, num_samples: int) -> _PassTimes:
        """Time one forward and, in training, one backward pass."""
        clock = _Clock(self._conditions.device)
        clock.stamp("forward", 0)
        for index, output in enumerate(self._forward(num_samples), start=1):
            clock.stamp("forward", index)
            if output.requires_grad:
                output.register_hook(partial(_stamp_backward, clock, index))
        if self._training:
            output.backward(torch.ones_like(output))
            clock.stamp("backward", 0)
        count = len(self._blocks)
        return _PassTimes(
            [clock.seconds(("forward", index), ("forward", index + 1)) for index in range(count)],
            [clock.seconds(("backward", index + 1), ("backward", index)) if self._training else 0.0 for index in range(count)],
        )

    def count_bytes(self, num_samples: int) -> None:
        """Fill `stored_bytes` and `sent_bytes`."""
        if not self._training:
            with _LiveBytes(self._own) as live:
                for index, output in enumerate(self._forward(num_samples)):
                    self.stored_bytes[index] = live.take_most() / num_samples
                    self.sent_bytes[index] = output.nbytes / num_samples
            return
        counted = set(self._own)
        current: dict[int, int] = {}

        def store(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in counted:
                current[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a node that saves its own output would keep itself, and the model's copy, for ever

        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
            for index, output in enumerate(self._forward(num_samples)):
                self.stored_bytes[index] = sum(current.values()) / num_samples
                self.sent_bytes[index] = output.nbytes / num_samples
                counted |= current.keys()
                current.clear()

    def _forward(self, num_samples: int) -> Iterator[Tensor]:
        """The output of each block; of the last one, the logits."""
        size = self._conditions.image_size
        images_BCHW = torch.rand(num_samples, 3, size, size, device=self._conditions.device, dtype=self._dtype)
        output = images_BCHW.to(memory_format=self._conditions.layout)
        with torch.inference_mode(not self._training):
            for block in self._blocks:
                with self._conditions.autocast():
                    result = block(output)
                output = result if isinstance(result, Tensor) else result[0]
                yield output


class _LiveBytes(TorchFunctionMode):
    """Counts the memory of the tensors that torch's functions return in it, on any device."""

    def __init__(self, ignored: Collection[int]) -> None:
        """`ignored`: addresses of parameters and buffers."""
        super().__init__()
        self._ignored, self._live_bytes = ignored, dict[int, int]()
        self._most_bytes = 0

    def take_most(self) -> int:
        """The most at a time since the last call."""
        most_bytes, self._most_bytes = self._most_bytes, sum(self._live_bytes.values())
        return most_bytes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address in self._ignored or address in self._live_bytes:
            return
        self._live_bytes[address] = storage.nbytes()
        weakref.finalize(storage, self._live_bytes.pop, address)
        self._most_bytes = max(self._most_bytes, sum(self._live_bytes.values()))


def _stamp_backward(clock: _Clock, index: int, gradient: Tensor) -> None:
    clock.stamp("backward", index)


class _Clock:
    """Time stamps of a device's work, by pass and cut."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: dict[tuple[str, int], torch.cuda.Event] = {}
        self._times_s: dict[tuple[str, int], float] = {}

    def stamp(self, kind: str, index: int) -> None:
        if not self._is_cuda:
            self._times_s[kind, index] = time.perf_counter()
            return
        self._events[kind, index] = torch.cuda.Event(enable_timing=True)
        self._events[kind, index].record()

    def seconds(self, first: tuple[str, int], then: tuple[str, int]) -> float:
        """Between two stamps; waits for the device."""
        if not self._is_cuda:
            return self._times_s[then] - self._times_s[first]
        self._events[then].synchronize()
        elapsed_ms: float = self._events[first].elapsed_time(self._events[then])
        return elapsed_ms / 1e3
