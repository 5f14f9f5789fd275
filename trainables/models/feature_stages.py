"""The stages of a model, found from the trace of one forward pass and not from the model's class.

A stage is a part of a model with one resolution. It ends with the last block at that resolution. A block is a module of a class
whose forward merges branches, by a sum (ResNet, MobileNetV2, ConvNeXt, Swin) or by a concatenation (DenseNet, GoogLeNet,
ShuffleNet). So a 1×1 convolution, a norm or an activation between the last block and the pooling is not part of a stage, as in
RepDistiller's `is_feat`. A model without blocks (VGG, AlexNet) is a chain: a stage ends with what follows the last convolution
of a resolution. `stem` is the first block's input, or in a chain what follows the first convolution. A model of ours whose
papers tap it otherwise has an attribute `STAGES`: the CIFAR VGGs have two groups at 4×4, and RepDistiller reads both.

`.preact` is the input of a stage's last activation. Where a stage does not end with an activation, it is the output of the next
norm, if an activation follows that (WRN, DenseNet), and otherwise the stage's output (MobileNetV2): again as in RepDistiller.

Shapes: B batch, C channels, H W pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from trainables.models.forward_trace import BATCH, RESHAPES, TensorVersion, Trace, TraceEvent


@dataclass(frozen=True)
class HookPoint:
    """A value that a hook can read."""

    events: tuple[TraceEvent, ...]
    """Where a hook sees the value: the first has the best name."""
    channels_last: bool = False
    """The value is a map (B, H, W, C), as in Swin; a tap returns it as (B, C, H, W)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, as a tap returns it."""
        _, *shape = self.events[0].shape
        return (shape[2], *shape[:2]) if self.channels_last else tuple(shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The modules with this output, outermost first; where there is none, a module with this input."""
        outputs = tuple(event.tap_name for event in self.events if event.direction == "out")
        return outputs or (self.events[0].tap_name,)


def stage_hook_points(model: nn.Module, trace: Trace) -> dict[str, HookPoint]:
    """`stem`, `stage1`, … and `stage1.preact`, … where a hook can read them; empty for a model without maps.

    `trace`: of a forward pass in eval mode without in-place modules.
    """
    modules = dict(model.named_modules())
    ends, stem = _declared_stages(trace, model) or _block_stages(trace, modules) or _chain_stages(trace, modules)
    if not ends:
        return {}
    # One layout in the whole model: a map with as many channels as pixels a side does not show which layout it has.
    channels_last = any(_is_channels_last(event) for event in ends)
    found: dict[str, HookPoint | None] = {}
    if stem is not None and stem.version != trace.image:
        found["stem"] = _hook_point(trace, stem.version, channels_last)
    for number, end in enumerate(ends, start=1):
        found[f"stage{number}"] = _hook_point(trace, end.version, channels_last)
    for number, end in enumerate(ends, start=1):
        preact = _hook_point(trace, _preactivation(trace, modules, end.version), channels_last)
        if preact is not None and not preact.events[0].overwritten:
            found[f"stage{number}.preact"] = preact
    return {name: hook_point for name, hook_point in found.items() if hook_point is not None}


def last_map(trace: Trace, pooled: TraceEvent) -> HookPoint | None:
    """The last map before `pooled` (B, D) that has D channels, if possible one of several positions; None: there is none."""
    before = trace.events[: trace.events.index(pooled)]
    maps = [event for event in before if event.path and _is_map(event) and pooled.shape[1] == _num_channels(event)]
    if not maps:
        return None
    found = next((event for event in reversed(maps) if _pixels_per_side(event) > 1), maps[-1])
    return _hook_point(trace, found.version, _is_channels_last(found))


def _is_map(event: TraceEvent) -> bool:
    """Whether the value is a square 4-D tensor of the whole batch; the windows of an attention are 4-D too."""
    shape = event.shape
    return len(shape) == 4 and shape[0] == BATCH and (shape[2] == shape[3] or shape[1] == shape[2])


def _is_channels_last(event: TraceEvent) -> bool:
    return event.shape[1] == event.shape[2] != event.shape[3]


def _num_channels(event: TraceEvent) -> int:
    return event.shape[3 if _is_channels_last(event) else 1]


def _pixels_per_side(event: TraceEvent) -> int:
    return event.shape[1 if _is_channels_last(event) else 3]


def _declared_stages(trace: Trace, model: nn.Module) -> tuple[list[TraceEvent], TraceEvent | None] | None:
    """The stages of a model with `STAGES`: the modules that end its stem and its stages."""
    paths: Sequence[str] = getattr(model, "STAGES", ())
    found = [event for path in paths if (event := trace.last(path, "out")) is not None]
    return (found[1:], found[0]) if found else None


def _block_stages(trace: Trace, modules: dict[str, nn.Module]) -> tuple[list[TraceEvent], TraceEvent | None] | None:
    """The output of the last block at each resolution, and the input of the first block; None where there are no blocks.

    A model whose blocks return tokens (ViT) has no stages: its only convolution makes the tokens.
    """
    if not trace.merging_classes:
        return None
    blocks = [event for event in trace.events if type(modules[event.path]) in trace.merging_classes and _is_map(event)]
    outputs = [event for event in blocks if event.direction == "out"]
    first_input = next((event for event in blocks if event.direction == "in"), None)
    return _last_of_each_resolution(outputs), first_input


def _last_of_each_resolution(outputs: list[TraceEvent]) -> list[TraceEvent]:
    """The last map of each resolution, without those of side branches: after a stage no map is larger."""
    ends: list[TraceEvent] = []
    for event in outputs:
        while ends and _pixels_per_side(ends[-1]) <= _pixels_per_side(event):
            ends.pop()
        ends.append(event)
    return ends


def _chain_stages(trace: Trace, modules: dict[str, nn.Module]) -> tuple[list[TraceEvent], TraceEvent | None]:
    """What follows the last convolution of each resolution, and what follows the first convolution."""
    convolutions: list[int] = []
    """Indices of the outputs of convolutions."""
    for index, event in enumerate(trace.events):
        module = modules[event.path]
        if event.direction == "out" and isinstance(module, _ConvNd) and _is_map(event):
            if _pixels_per_side(event) == 1 and module.kernel_size[0] > 1 and not any(module.padding):
                break  # it reads the whole map: a linear layer in effect, as in timm's VGG
            convolutions.append(index)
    if not convolutions:
        return [], None
    index_of = {id(trace.events[index]): index for index in convolutions}
    ends = _last_of_each_resolution([trace.events[index] for index in convolutions])
    return [_follow(trace, modules, index_of[id(end)]) for end in ends], _follow(trace, modules, convolutions[0])


def _follow(trace: Trace, modules: dict[str, nn.Module], index: int) -> TraceEvent:
    """The last event of this resolution before the next convolution, or before the resolution changes."""
    found = trace.events[index]
    for event in trace.events[index + 1 :]:
        if event.direction == "in" and isinstance(modules[event.path], _ConvNd):
            break
        if not _is_map(event) or _pixels_per_side(event) != _pixels_per_side(found):
            break
        found = event
    return found


def _preactivation(trace: Trace, modules: dict[str, nn.Module], end: TensorVersion) -> TensorVersion:
    """The input of the stage's last activation."""
    version = end
    while version in trace.produced_by:
        version, function = trace.produced_by[version]
        if function not in RESHAPES:
            return version
    normed = _output_of_next_norm(trace, modules, end)
    produced_by = {source for source, function in trace.produced_by.values() if function not in RESHAPES}
    return normed if normed is not None and normed in produced_by else end


def _output_of_next_norm(trace: Trace, modules: dict[str, nn.Module], version: TensorVersion) -> TensorVersion | None:
    for event in trace.events:
        if event.direction == "in" and event.version == version and "Norm" in type(modules[event.path]).__name__:
            return trace.counterpart(event).version
    return None


def _hook_point(trace: Trace, version: TensorVersion, channels_last: bool) -> HookPoint | None:
    """Where hooks see this value: outermost first, outputs before inputs. None: nowhere.

    A hook has the value of a module's last call. A module that returns its input (an identity, a dropout in eval mode) did not
    compute the value.
    """
    events = [
        event
        for event in trace.events
        if event.version == version
        and event.path
        and trace.last(event.path, event.direction) is event
        and (event.direction == "in" or trace.counterpart(event).version != version)
    ]
    if not events:
        return None
    events.sort(key=lambda event: (event.direction == "in", event.path.count(".")))
    return HookPoint(tuple(events), channels_last)
