"""Taps: named points of a model whose values a method reads, on any model of ours, torchvision's or timm's.

Names: `stem`; `stage1`, `stage2`, …, `stage-1` the last; `stages`, all of them; `stage1.preact`, …, `stages.preact`; `pooled`,
what the final linear layer reads, (B, D); `unpooled`, the last map of D channels before it; or a module's dotted path, its
output, and with `:in` its input. `stages.py` says what a stage is. The names of stages go before equal ones of modules
(torchvision's ShuffleNetV2 has a `stage2`).

A tap is a hook that keeps a reference to a tensor that the forward makes anyway: outputs and gradients are bit-equal to those of
the model without. A module called several times in a forward gives the value of its last call.

Shapes: B batch, C channels, H W pixels, D features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainables.errors import ModelError, near
from trainables.models.feature_stages import HookPoint, last_map, stage_hook_points
from trainables.models.forward_trace import BATCH, Trace, TraceEvent, inplace_disabled, trace_forward

STAGE = re.compile(r"stage(-?\d+)(\.preact)?")


@dataclass(frozen=True)
class TapInfo:
    """Where a tap can be: its best name, other names of the same value, and the shape of one sample's."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]


def list_taps(model: nn.Module, image_size: int, *, every: bool = False) -> list[TapInfo]:
    """The stem, stages, pre-activations and pooled features; with `every` the output of every module as well.

    Neither parameters, batch statistics, modes nor generators move.
    """
    trace, hook_points = _survey(model, image_size)
    named: dict[tuple[TraceEvent, ...], list[str]] = {}
    for name, hook_point in hook_points.items():
        if not hook_point.events[0].overwritten:  # by a function between modules: no hook reads it in time
            named.setdefault(hook_point.events, []).append(name)
    found = [
        TapInfo(
            first, (*rest, *(alias for alias in hook_points[first].names if not STAGE.fullmatch(alias))), hook_points[first].shape
        )
        for names in named.values()
        for first, *rest in [sorted(names, key="stem".__eq__)]
    ]
    if every:
        paths = [event.path for event in trace.events if event.direction == "out" and event.path]
        last = [trace.last(path, "out") for path in dict.fromkeys(paths)]
        found += [
            TapInfo(event.path, (), tuple(event.value.shape[1:]))
            for event in last
            if event is not None and event.value is not None and _by_sample(event.value) and not event.overwritten
        ]
    return found


def classifier(model: nn.Module) -> nn.Linear:
    """The final linear layer: what timm's `get_classifier` names, otherwise the last module that has parameters of its own.

    Raises:
        ModelError: that is no linear layer.
    """
    if callable(own := getattr(model, "get_classifier", None)):
        last = own()
    else:
        last = next((m for m in reversed(list(model.modules())) if next(m.parameters(recurse=False), None) is not None), None)
    if isinstance(last, nn.Linear):
        return last
    raise ModelError(
        f"{type(model).__name__} ends with {type(last).__name__}, not with a linear layer: choose a model that does, "
        "or a method that needs none"
    )


def run_before(model: nn.Module, tap: str, *, name: str, image_size: int) -> set[str]:
    """Paths of the modules that begin to run before the value of a tap is there: no other has a part in it.

    Raises:
        ModelError: no such tap.
    """
    trace, hook_points = _survey(model, image_size)
    (one,) = _expand(tap, hook_points, name)
    found = _find(one, model, trace, hook_points, name).events[0]
    place = next(place for place, event in enumerate(trace.events) if event is found)
    return {event.path for event in trace.events[: place + 1] if event.direction == "in"}


@dataclass
class _Slot:
    """What one hook keeps."""

    channels_last: bool
    open: bool = False
    tensor: Tensor | None = None


class Taps:
    """Hooks on a model. Install them on the finished model (batch norms replaced, if they are to be), before it is compiled.

    They read through DistributedDataParallel and through a compiled forward. Under `inference_mode` they give inference tensors.
    """

    names: tuple[str, ...]
    """In the order asked for, `stages` and `stage-1` resolved."""
    shapes: tuple[tuple[int, ...], ...]
    """Per sample: (C, H, W), (D,) or what else the module gives."""

    def __init__(self, model: nn.Module, names: Sequence[str], *, name: str, image_size: int) -> None:
        """`name` is the model's, for messages. An in-place activation right behind a tap is switched to work out of place.

        That is for good: what another tap reads may rest on it, and the results are the same bits.

        Raises:
            ModelError: no such tap, with the nearest that exist; it is no tensor of samples, or overwritten after it is read.
        """
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise RuntimeError("taps go in before model.compile(): a compiled forward does not look for new hooks")
        self._handles: list[Any] = []
        self._slots: list[_Slot] = []
        self.names, self.shapes = (), ()
        if not names:
            return
        trace, hook_points = _survey(model, image_size)
        self.names = tuple(one for asked in names for one in _expand(asked, hook_points, name))
        found = [_find(one, model, trace, hook_points, name) for one in self.names]
        self.shapes = tuple(hook_point.shape for hook_point in found)
        _keep_whole(
            model, image_size, {one: hook_point.events[0] for one, hook_point in zip(self.names, found, strict=True)}, name
        )
        for hook_point in found:
            slot, event = _Slot(hook_point.channels_last), hook_point.events[0]
            module = model.get_submodule(event.path)
            if event.direction == "out":
                self._handles.append(module.register_forward_hook(_output_hook(slot)))
            else:
                self._handles.append(module.register_forward_pre_hook(_input_hook(slot)))
            self._slots.append(slot)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Forwards in here are read, all others are not; what is not taken by its end is forgotten."""
        for slot in self._slots:
            slot.open = True
        try:
            yield
        finally:
            for slot in self._slots:
                slot.open, slot.tensor = False, None

    def pop(self) -> tuple[Tensor, ...]:
        """What the last forward in `capture()` gave, in the order of `names`, and forgets it.

        Raises:
            RuntimeError: no forward ran, or a tapped module did not run in it.
        """
        kept = [slot.tensor for slot in self._slots]
        if missing := [name for name, tensor in zip(self.names, kept, strict=True) if tensor is None]:
            raise RuntimeError(f"taps {', '.join(missing)} saw no forward since reading began or since they were taken")
        for slot in self._slots:
            slot.tensor = None
        return tuple(
            tensor.permute(0, 3, 1, 2) if slot.channels_last else tensor
            for slot, tensor in zip(self._slots, kept, strict=True)
            if tensor is not None
        )

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._slots.clear()
        self.names, self.shapes = (), ()


def _output_hook(slot: _Slot) -> Callable[..., None]:
    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if slot.open:
            slot.tensor = output

    return keep


def _input_hook(slot: _Slot) -> Callable[..., None]:
    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        if slot.open:
            slot.tensor = args[0]

    return keep


def _survey(model: nn.Module, image_size: int) -> tuple[Trace, dict[str, HookPoint]]:
    """One forward, and what has a name of its own in it."""
    with inplace_disabled(model):
        trace = trace_forward(model, image_size, training=False)
    hook_points = stage_hook_points(model, trace)
    try:
        last = classifier(model)
    except ModelError:
        return trace, hook_points
    path = next(path for path, module in model.named_modules() if module is last)
    event = trace.last(path, "in")
    if event is not None and event.value is not None and event.value.ndim == 2:
        hook_points["pooled"] = HookPoint((event,))
        if "stage1" in hook_points and (unpooled := last_map(trace, event)) is not None:  # tokens are no map
            hook_points["unpooled"] = unpooled
    return trace, hook_points


def _by_sample(value: Tensor) -> bool:
    return value.ndim > 1 and value.shape[0] == BATCH


def _expand(asked: str, hook_points: dict[str, HookPoint], name: str) -> list[str]:
    """`stages`, `stages.preact` and `stage-1` as numbered stages; any other name as it is."""
    numbered = STAGE.fullmatch(asked)
    if not numbered and asked not in ("stages", "stages.preact"):
        return [asked]
    count = sum(1 for hook_point in hook_points if STAGE.fullmatch(hook_point) and not hook_point.endswith(".preact"))
    if not count:
        raise ModelError(
            f"model {name} has no {asked}: it makes no maps that shrink stage by stage; {_there_are(hook_points)}, or any module's "
            f"path: `distill taps {name} --all`"
        )
    if not numbered:
        return [asked.replace("stages", f"stage{number}") for number in range(1, count + 1)]
    number = int(numbered[1])
    return [f"stage{count + 1 + number}{numbered[2] or ''}"] if -count <= number < 0 else [asked]


def _there_are(hook_points: dict[str, HookPoint]) -> str:
    return f"there are {', '.join(hook_points)}" if hook_points else "there are only modules"


def _find(tap: str, model: nn.Module, trace: Trace, hook_points: dict[str, HookPoint], name: str) -> HookPoint:
    """Where to read the tap of this name."""
    if tap in hook_points:
        return hook_points[tap]
    if tap.endswith(".preact") and tap.removesuffix(".preact") in hook_points:
        raise ModelError(
            f"model {name} has no {tap} that can be read: that activation is a function between modules, which no hook sees; "
            f"{_there_are(hook_points)}"
        )
    if tap == "unpooled" and "pooled" in hook_points:
        raise ModelError(
            f"model {name} has no unpooled: what its linear layer reads was never a map of as many channels; {_there_are(hook_points)}"
        )
    if tap in ("pooled", "unpooled"):
        raise ModelError(f"model {name} has no {tap}: it does not end with a linear layer on (B, D); {_there_are(hook_points)}")
    path, _, direction = tap.partition(":")
    modules = dict(model.named_modules())
    if not path or path not in modules or direction not in ("", "in"):
        similar = near(tap, [*hook_points, *modules], count=3)
        nearest = f"the nearest are {' or '.join(similar)}" if similar else _there_are(hook_points)
        raise ModelError(f"model {name} has no tap {tap!r}: {nearest}; `distill taps {name} --all` lists them")
    event = trace.last(path, "in" if direction else "out")
    if event is None:
        raise ModelError(f"model {name}: {tap} is not called in eval mode; {_there_are(hook_points)}")
    if event.value is None:
        raise ModelError(f"model {name}: {tap} is a {event.kind}, not a tensor; choose a module inside or outside of it")
    if not _by_sample(event.value):
        shape = tuple(event.value.shape)
        raise ModelError(
            f"model {name}: {tap} has shape {shape} for {BATCH} images, so its rows are no samples; choose a module outside of it"
        )
    return HookPoint((event,))


def _keep_whole(model: nn.Module, image_size: int, taps: dict[str, TraceEvent], name: str) -> None:
    """See that no tapped tensor is changed in place after it is read, in training or eval mode.

    Raises:
        ModelError: it is, and not by a module that can be told to work out of place.
    """
    modules = dict(model.named_modules())
    while True:
        switched = False
        for training in (False, True):
            try:
                trace = trace_forward(model, image_size, training=training)
            except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
                if not training:
                    raise
                continue  # a teacher may be one that cannot be trained at this size
            for tap, event in taps.items():
                read = trace.last(event.path, event.direction)
                if read is None or read.value is None:
                    raise ModelError(f"model {name}: {tap} is not called in training; choose another")
                if not read.overwritten:
                    continue
                culprits = [modules[path] for path in _changers(trace, read) if getattr(modules[path], "inplace", None) is True]
                if not culprits:
                    raise ModelError(
                        f"model {name}: {tap} is overwritten in place after it is read; choose the module that comes next, "
                        "or one outside of it"
                    )
                for module in culprits:
                    module.inplace = False  # type: ignore[assignment]
                switched = True
        if not switched:
            return


def _changers(trace: Trace, read: TraceEvent) -> list[str]:
    """Modules that are given the same memory from then on."""
    assert read.value is not None
    memory = read.value.untyped_storage()._cdata
    begins = next(place for place, event in enumerate(trace.events) if event is read)
    return [
        event.path
        for event in trace.events[begins:]
        if event.direction == "in" and event.value is not None and event.value.untyped_storage()._cdata == memory
    ]
