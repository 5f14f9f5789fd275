"""Where a model's stages end, found from one forward (`trace_forward.Trace`) and not from its class.

A stage is what has one resolution. It ends with the last block there; a block is a module of a class in whose forward branches
meet, by a sum (ResNet, MobileNetV2, ConvNeXt, Swin) or a concatenation (DenseNet, GoogLeNet, ShuffleNet), so that a 1×1
convolution, a norm or an activation between the last block and the pooling is no part of a stage, as in RepDistiller's
`is_feat`. A model without blocks (VGG, AlexNet) is a chain: a stage ends with what follows the last convolution of a resolution.
`stem` is what the first block is given, or in a chain what follows the first convolution. A model of ours whose papers tap it
otherwise says so itself (`STAGES`): the CIFAR VGGs have two groups at 4×4, and RepDistiller reads both.

`.preact` is what a stage's last activation is given. Where a stage does not end with an activation, it is the norm that comes
next, if an activation follows it (WRN, DenseNet), and otherwise the stage itself (MobileNetV2): again as in RepDistiller.

Shapes: B batch, C channels, H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from trainables.models.forward_trace import BATCH, RESHAPES, TensorVersion, Trace, TraceEvent


@dataclass(frozen=True)
class HookPoint:
    """A value that a hook can read, and the borders at which it does: the first is the best name."""

    events: tuple[TraceEvent, ...]
    channels_last: bool = False
    """A map (B, H, W, C), as in Swin; it is handed out as (B, C, H, W)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample, as it is handed out."""
        value = self.events[0].value
        assert value is not None
        shape = tuple(value.shape[1:])
        return (shape[2], *shape[:2]) if self.channels_last else shape

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that give this value, outermost first; where none does, one that takes it."""
        outputs = tuple(event.name for event in self.events if event.direction == "out")
        return outputs or (self.events[0].name,)


def stage_hook_points(model: nn.Module, trace: Trace) -> dict[str, HookPoint]:
    """`stem`, `stage1`, …, and `stage1.preact`, … where a hook can read them; of a model without maps nothing.

    `trace`: of a forward in eval mode with nothing in place.
    """
    modules = dict(model.named_modules())
    ends, stem = _told(trace, model) or _blocks(trace, modules) or _chain(trace, modules)
    if not ends:
        return {}
    # One layout in the whole model: a map of as many channels as pixels a side does not say which it has.
    last = any(_is_channels_last(event.value.shape) for event in ends if event.value is not None)
    hook_points: dict[str, HookPoint] = {}
    if stem is not None and stem.key is not None and stem.key != trace.image:
        _add(hook_points, "stem", _site(trace, stem.key, last))
    for number, end in enumerate(ends, start=1):
        assert end.key is not None
        _add(hook_points, f"stage{number}", _site(trace, end.key, last))
    for number, end in enumerate(ends, start=1):
        assert end.key is not None
        before = _preact(trace, modules, end.key)
        hook_point = _site(trace, before, last)
        if hook_point is not None and not hook_point.events[0].overwritten:
            hook_points[f"stage{number}.preact"] = hook_point
    return hook_points


def _told(trace: Trace, model: nn.Module) -> tuple[list[TraceEvent], TraceEvent | None] | None:
    """Where the model says so itself: `STAGES` names the modules that end its stem and its stages."""
    paths: Sequence[str] = getattr(model, "STAGES", ())
    found = [event for path in paths if (event := trace.last(path, "out")) is not None]
    return (found[1:], found[0]) if found else None


def last_map(trace: Trace, pooled: TraceEvent) -> HookPoint | None:
    """The last map before `pooled` (B, D) of as many channels, if possible of several positions; None: there is none."""
    assert pooled.value is not None
    maps = [
        event
        for event in trace.events[: trace.events.index(pooled)]
        if event.path and _is_map(event) and pooled.value.shape[1] == _channels(event)
    ]
    if not maps:
        return None
    found = next((event for event in reversed(maps) if _side(event) > 1), maps[-1])
    assert found.value is not None
    assert found.key is not None
    return _site(trace, found.key, _is_channels_last(found.value.shape))


def _channels(event: TraceEvent) -> int:
    assert event.value is not None
    return event.value.shape[3 if _is_channels_last(event.value.shape) else 1]


def _add(hook_points: dict[str, HookPoint], name: str, hook_point: HookPoint | None) -> None:
    if hook_point is not None:
        hook_points[name] = hook_point


def _is_map(event: TraceEvent) -> bool:
    """Images are square, so a map is; windows of attention are 4-D too."""
    if event.value is None or event.value.ndim != 4:
        return False
    shape = event.value.shape
    return shape[0] == BATCH and (shape[2] == shape[3] or shape[1] == shape[2])


def _is_channels_last(shape: Sequence[int]) -> bool:
    return shape[1] == shape[2] != shape[3]


def _side(event: TraceEvent) -> int:
    """Pixels a side."""
    assert event.value is not None
    shape = event.value.shape
    return shape[1] if _is_channels_last(shape) else shape[3]


def _blocks(trace: Trace, modules: dict[str, nn.Module]) -> tuple[list[TraceEvent], TraceEvent | None] | None:
    """The last block's output at each resolution, and the first block's input; None where there are no blocks.

    A model whose blocks give tokens (ViT) has no stages: its one convolution makes the tokens.
    """
    if not trace.merging_classes:
        return None
    blocks = [event for event in trace.events if type(modules[event.path]) in trace.merging_classes and _is_map(event)]
    outputs = [event for event in blocks if event.direction == "out"]
    return _falling(outputs), next((event for event in blocks if event.direction == "in"), None)


def _falling(outputs: list[TraceEvent]) -> list[TraceEvent]:
    """The last of each resolution, but none of a side branch: after a stage no map is larger."""
    ends: list[TraceEvent] = []
    for event in outputs:
        while ends and _side(ends[-1]) <= _side(event):
            ends.pop()
        ends.append(event)
    return ends


def _chain(trace: Trace, modules: dict[str, nn.Module]) -> tuple[list[TraceEvent], TraceEvent | None]:
    """What follows the last convolution of each resolution, and what follows the first convolution."""
    convolved: dict[int, int] = {}
    for place, event in enumerate(trace.events):
        module = modules[event.path]
        if event.direction == "out" and isinstance(module, _ConvNd) and _is_map(event):
            if _side(event) == 1 and module.kernel_size[0] > 1 and not any(module.padding):
                break  # it reads the whole map: a linear layer by another name, as in timm's VGG
            convolved[id(event)] = place
    ends = _falling([trace.events[place] for place in convolved.values()])
    first = next(iter(convolved.values()), None)
    return [_follow(trace, modules, convolved[id(end)]) for end in ends], (
        None if first is None else _follow(trace, modules, first)
    )


def _follow(trace: Trace, modules: dict[str, nn.Module], place: int) -> TraceEvent:
    """The last border of this resolution before the next convolution, or before the resolution changes."""
    found = trace.events[place]
    for event in trace.events[place + 1 :]:
        if event.direction == "in" and isinstance(modules[event.path], _ConvNd):
            break
        if not _is_map(event) or _side(event) != _side(found):
            break
        found = event
    return found


def _preact(trace: Trace, modules: dict[str, nn.Module], end: TensorVersion) -> TensorVersion:
    """What the stage's last activation is given."""
    key = end
    while key in trace.produced_by:
        key, name = trace.produced_by[key]
        if name not in RESHAPES:
            return key
    normed = _next_norm(trace, modules, end)
    produced_by = {given for given, name in trace.produced_by.values() if name not in RESHAPES}
    return normed if normed is not None and normed in produced_by else end


def _next_norm(trace: Trace, modules: dict[str, nn.Module], key: TensorVersion) -> TensorVersion | None:
    """The result of the norm that reads this value."""
    for event in trace.events:
        if event.direction == "in" and event.key == key and "Norm" in type(modules[event.path]).__name__:
            return trace.other_side(event).key
    return None


def _site(trace: Trace, key: TensorVersion, channels_last: bool) -> HookPoint | None:
    """Where hooks see this value: outermost first, a module's output before a module's input. None: at no border.

    A hook keeps what crossed in a module's last call. A module that passes on what it is given (an identity, a dropout in eval
    mode) did not make it.
    """
    seen = [
        event
        for event in trace.events
        if event.key == key
        and event.path
        and trace.last(event.path, event.direction) is event
        and (event.direction == "in" or trace.other_side(event).key != key)
    ]
    if not seen:
        return None
    seen.sort(key=lambda event: (event.direction == "in", event.path.count(".")))
    return HookPoint(tuple(seen), channels_last)
