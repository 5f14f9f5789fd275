"""Taps: hooks that read named values of a model, on any model of ours, torchvision's or timm's.

A hook keeps a reference to a tensor that the forward pass computes anyway: outputs and gradients are bit-equal to those of the
model without taps. Of a module that is called several times in a forward pass it has the value of the last call. `tap_names`
says which names there are.

Shapes: B batch, C channels, H W pixels, D features.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from trainables.errors import ModelError
from trainables.models.forward_trace import Trace, TraceEvent, trace_forward
from trainables.models.tap_names import TapSurvey


@dataclass
class _Slot:
    """The value that one hook has captured."""

    channels_last: bool
    capturing: bool = False
    tensor: Tensor | None = None

    def store_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The forward pre-hook of a module whose input is tapped."""
        if self.capturing:
            self.tensor = args[0]

    def store_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """The forward hook of a module whose output is tapped."""
        if self.capturing:
            self.tensor = output


class Taps:
    """Hooks on a model. Install them on the finished model (after batch norms are replaced), before it is compiled.

    They also read through DistributedDataParallel and through a compiled forward pass. Under `inference_mode` they return
    inference tensors.
    """

    names: tuple[str, ...]
    """In the order of the constructor's, with `stages` and `stage-1` resolved."""
    shapes: tuple[tuple[int, ...], ...]
    """Of one sample: (C, H, W), (D,) or what else the module returns."""
    modules: tuple[str, ...]
    """The paths of the modules that are read, in the same order."""

    def __init__(self, model: nn.Module, names: Sequence[str], *, name: str, image_size: int) -> None:
        """`name` is the model's, for messages. An in-place activation that follows a tap is switched to work out of place.

        It stays switched: another tap may depend on it, and the results have the same bits.

        Raises ModelError: no such tap, with the nearest that exist; it is no tensor of samples, or overwritten after it is read.
        """
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise RuntimeError("taps go in before model.compile(): a compiled forward does not look for new hooks")
        self._handles: list[Any] = []
        self._slots: list[_Slot] = []
        self.names, self.shapes, self.modules = (), (), ()
        if not names:
            return
        survey = TapSurvey(model, image_size, name=name)
        self.names = tuple(chain.from_iterable(map(survey.expand, names)))
        found = [survey.find(tap) for tap in self.names]
        self.shapes = tuple(hook_point.shape for hook_point in found)
        self.modules = tuple(hook_point.events[0].path for hook_point in found)
        events = {tap: hook_point.events[0] for tap, hook_point in zip(self.names, found, strict=True)}
        _protect(model, image_size, events, name)
        for hook_point in found:
            slot, event = _Slot(hook_point.channels_last), hook_point.events[0]
            module = model.get_submodule(event.path)
            if event.direction == "out":
                self._handles.append(module.register_forward_hook(slot.store_output))
            else:
                self._handles.append(module.register_forward_pre_hook(slot.store_input))
            self._slots.append(slot)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A context whose forward passes are captured; values that are not popped before its end are dropped."""
        for slot in self._slots:
            slot.capturing = True
        try:
            yield
        finally:
            for slot in self._slots:
                slot.capturing, slot.tensor = False, None

    def pop(self) -> tuple[Tensor, ...]:
        """The values of the last forward pass in `capture()`, in the order of `names`. No reference to them is kept.

        Raises RuntimeError: no forward pass ran, or a tapped module did not run in it.
        """
        tensors = [slot.tensor for slot in self._slots]
        missing = [name for name, tensor in zip(self.names, tensors, strict=True) if tensor is None]
        if missing:
            raise RuntimeError(f"taps {', '.join(missing)} captured no forward pass since capture() or the last pop()")
        for slot in self._slots:
            slot.tensor = None
        return tuple(
            tensor.permute(0, 3, 1, 2) if slot.channels_last else tensor
            for slot, tensor in zip(self._slots, tensors, strict=True)
            if tensor is not None
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._slots.clear()
        self.names, self.shapes, self.modules = (), (), ()


def _protect(model: nn.Module, image_size: int, taps: dict[str, TraceEvent], name: str) -> None:
    """Switch modules that would overwrite a tapped tensor, in training or eval mode, to work out of place.

    Raises ModelError: a tensor is overwritten by something else than a module with an `inplace` flag.
    """
    modules = dict(model.named_modules())
    switched = True
    while switched:
        switched = False
        for training in (False, True):
            try:
                trace = trace_forward(model, image_size, training=training)
            except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
                if not training:
                    raise
                continue  # a teacher may be one that cannot be trained at this size
            for tap, event in taps.items():
                overwriting = _overwriting(trace, modules, tap, event, name)
                for module in overwriting:
                    module.inplace = False  # type: ignore[assignment]
                switched = switched or bool(overwriting)


def _overwriting(trace: Trace, modules: dict[str, nn.Module], tap: str, tapped: TraceEvent, name: str) -> list[nn.Module]:
    """The in-place modules that may overwrite the value of a tap after it is read; empty: it is not overwritten."""
    read = trace.last(tapped.path, tapped.direction)
    if read is None or not read.shape:
        raise ModelError(f"model {name}: {tap} is not called in training; choose another")
    if not read.overwritten:
        return []
    storage = read.value.untyped_storage()._cdata
    begin = next(index for index, event in enumerate(trace.events) if event is read)
    readers = [
        modules[event.path]
        for event in trace.events[begin:]
        if event.direction == "in" and event.shape and event.value.untyped_storage()._cdata == storage
    ]
    inplace = [module for module in readers if getattr(module, "inplace", None) is True]
    if not inplace:
        raise ModelError(
            f"model {name}: {tap} is overwritten in place after it is read; choose the module that comes next,"
            " or one outside of it"
        )
    return inplace
