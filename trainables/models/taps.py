"""Taps: hooks that capture named activations of a model from any library.

A hook only keeps a reference to a tensor of the forward pass, so outputs and gradients are bit-identical to those without taps.
If a module is called several times, its last call counts. `tap_names` lists the names.

Shapes: B batch, C channels, H W pixels, D features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from trainables.errors import ModelError
from trainables.models.module_calls import Call, last_call, record_calls
from trainables.models.tap_names import TapNames, disable_inplace


@dataclass
class _Slot:
    """The value captured by one hook."""

    read: Callable[[Tensor], Tensor]
    capturing: bool = False
    tensor: Tensor | None = None

    def store(self, module: nn.Module, args: tuple[Any, ...], *output: Tensor) -> None:
        """Forward hook of a module whose output is tapped, or pre-hook of one whose input is."""
        if self.capturing:
            self.tensor = output[0] if output else args[0]


class Taps:
    """Hooks on a model. Install them on the finished model (after batch norms are replaced), before it is compiled.

    They also work under DistributedDataParallel and in a compiled forward pass. Under `inference_mode` they return inference
    tensors.
    """

    names: tuple[str, ...]
    """The constructor's `names` in order, with `stages` and `stage-1` expanded."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of one sample: (C, H, W), (D,) or any other that the module returns."""
    modules: tuple[str, ...]
    """Paths of the tapped modules, in the same order."""

    def __init__(self, model: nn.Module, names: Sequence[str], *, name: str, image_size: int) -> None:
        """`name` is the model's, for messages. Modules with an `inplace` flag work out of place from now on.

        Raises ModelError: no such tap, with the nearest that exist; it is no tensor of samples, or overwritten after it is read.
        """
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise RuntimeError("install taps before model.compile(): a compiled forward ignores new hooks")
        self._slots: list[_Slot] = []
        self.names, self.shapes, self.modules = (), (), ()
        if not names:
            return
        disable_inplace(model)
        found = TapNames(model, image_size, name=name)
        self.names = tuple(chain.from_iterable(map(found.expand, names)))
        calls = {tap: found.find(tap) for tap in self.names}
        self.shapes = tuple(map(found.shape, self.names))
        self.modules = tuple(calls[tap].path for tap in self.names)
        _check_overwritten(name, calls)
        _check_overwritten(name, _calls_in_training(model, image_size, name, calls))
        for tap in self.names:
            slot, module = _Slot(found.read(tap)), model.get_submodule(calls[tap].path)
            if calls[tap].direction == "out":
                module.register_forward_hook(slot.store)
            else:
                module.register_forward_pre_hook(slot.store)
            self._slots.append(slot)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the forward passes within this context; values not popped before its end are dropped."""
        for slot in self._slots:
            slot.capturing = True
        try:
            yield
        finally:
            for slot in self._slots:
                slot.capturing, slot.tensor = False, None

    def pop(self) -> tuple[Tensor, ...]:
        """Return the values of the last forward pass in `capture()`, in the order of `names`, and drop the references to them.

        Raises RuntimeError: no forward pass ran, or a tapped module did not run in it.
        """
        tensors = [slot.tensor for slot in self._slots]
        missing = [name for name, tensor in zip(self.names, tensors, strict=True) if tensor is None]
        if missing:
            raise RuntimeError(f"taps {', '.join(missing)} captured no forward pass since capture() or the last pop()")
        for slot in self._slots:
            slot.tensor = None
        return tuple(slot.read(tensor) for slot, tensor in zip(self._slots, tensors, strict=True) if tensor is not None)


def _calls_in_training(model: nn.Module, image_size: int, name: str, taps: Mapping[str, Call]) -> dict[str, Call]:
    """Return the same calls in training mode; none for a model that cannot be trained at this size, as some teachers."""
    try:
        calls = record_calls(model, image_size, training=True)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return {}
    found = {}
    for tap, call in taps.items():
        in_training = last_call(calls, call.path, call.direction)
        if in_training is None or not in_training.shape:
            raise ModelError(f"model {name}: {tap} is not called in training; choose another")
        found[tap] = in_training
    return found


def _check_overwritten(name: str, taps: Mapping[str, Call]) -> None:
    for tap, call in taps.items():
        if call.overwritten:
            raise ModelError(
                f"model {name}: {tap} is overwritten in place after it is read; choose the next module, or one around it"
            )
