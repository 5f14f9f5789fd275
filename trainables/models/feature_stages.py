"""Where a model's stages end, found from one forward (`probe.Trace`) and not from its class.

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

from trainables.models.forward_trace import BATCH, RESHAPES, Border, Key, Trace


@dataclass(frozen=True)
class Site:
    """A value that a hook can read, and the borders at which it does: the first is the best name."""

    borders: tuple[Border, ...]
    channels_last: bool = False
    """A map (B, H, W, C), as in Swin; it is handed out as (B, C, H, W)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample, as it is handed out."""
        value = self.borders[0].value
        assert value is not None
        shape = tuple(value.shape[1:])
        return (shape[2], *shape[:2]) if self.channels_last else shape

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that give this value, outermost first; where none does, one that takes it."""
        outputs = tuple(border.name for border in self.borders if border.side == "out")
        return outputs or (self.borders[0].name,)


def stage_sites(model: nn.Module, trace: Trace) -> dict[str, Site]:
    """`stem`, `stage1`, …, and `stage1.preact`, … where a hook can read them; of a model without maps nothing.

    `trace`: of a forward in eval mode with nothing in place.
    """
    modules = dict(model.named_modules())
    ends, stem = _told(trace, model) or _blocks(trace, modules) or _chain(trace, modules)
    if not ends:
        return {}
    # One layout in the whole model: a map of as many channels as pixels a side does not say which it has.
    last = any(_is_channels_last(border.value.shape) for border in ends if border.value is not None)
    sites: dict[str, Site] = {}
    if stem is not None and stem.key is not None and stem.key != trace.image:
        _add(sites, "stem", _site(trace, stem.key, last))
    for number, end in enumerate(ends, start=1):
        assert end.key is not None
        _add(sites, f"stage{number}", _site(trace, end.key, last))
    for number, end in enumerate(ends, start=1):
        assert end.key is not None
        before = _preact(trace, modules, end.key)
        site = _site(trace, before, last)
        if site is not None and not site.borders[0].overwritten:
            sites[f"stage{number}.preact"] = site
    return sites


def _told(trace: Trace, model: nn.Module) -> tuple[list[Border], Border | None] | None:
    """Where the model says so itself: `STAGES` names the modules that end its stem and its stages."""
    paths: Sequence[str] = getattr(model, "STAGES", ())
    found = [border for path in paths if (border := trace.last(path, "out")) is not None]
    return (found[1:], found[0]) if found else None


def last_map(trace: Trace, pooled: Border) -> Site | None:
    """The last map before `pooled` (B, D) of as many channels, if possible of several positions; None: there is none."""
    assert pooled.value is not None
    maps = [
        border
        for border in trace.borders[: trace.borders.index(pooled)]
        if border.path and _is_map(border) and pooled.value.shape[1] == _channels(border)
    ]
    if not maps:
        return None
    found = next((border for border in reversed(maps) if _side(border) > 1), maps[-1])
    assert found.value is not None
    assert found.key is not None
    return _site(trace, found.key, _is_channels_last(found.value.shape))


def _channels(border: Border) -> int:
    assert border.value is not None
    return border.value.shape[3 if _is_channels_last(border.value.shape) else 1]


def _add(sites: dict[str, Site], name: str, site: Site | None) -> None:
    if site is not None:
        sites[name] = site


def _is_map(border: Border) -> bool:
    """Images are square, so a map is; windows of attention are 4-D too."""
    if border.value is None or border.value.ndim != 4:
        return False
    shape = border.value.shape
    return shape[0] == BATCH and (shape[2] == shape[3] or shape[1] == shape[2])


def _is_channels_last(shape: Sequence[int]) -> bool:
    return shape[1] == shape[2] != shape[3]


def _side(border: Border) -> int:
    """Pixels a side."""
    assert border.value is not None
    shape = border.value.shape
    return shape[1] if _is_channels_last(shape) else shape[3]


def _blocks(trace: Trace, modules: dict[str, nn.Module]) -> tuple[list[Border], Border | None] | None:
    """The last block's output at each resolution, and the first block's input; None where there are no blocks.

    A model whose blocks give tokens (ViT) has no stages: its one convolution makes the tokens.
    """
    if not trace.joiners:
        return None
    blocks = [border for border in trace.borders if type(modules[border.path]) in trace.joiners and _is_map(border)]
    outputs = [border for border in blocks if border.side == "out"]
    return _falling(outputs), next((border for border in blocks if border.side == "in"), None)


def _falling(outputs: list[Border]) -> list[Border]:
    """The last of each resolution, but none of a side branch: after a stage no map is larger."""
    ends: list[Border] = []
    for border in outputs:
        while ends and _side(ends[-1]) <= _side(border):
            ends.pop()
        ends.append(border)
    return ends


def _chain(trace: Trace, modules: dict[str, nn.Module]) -> tuple[list[Border], Border | None]:
    """What follows the last convolution of each resolution, and what follows the first convolution."""
    convolved: dict[int, int] = {}
    for place, border in enumerate(trace.borders):
        module = modules[border.path]
        if border.side == "out" and isinstance(module, _ConvNd) and _is_map(border):
            if _side(border) == 1 and module.kernel_size[0] > 1 and not any(module.padding):
                break  # it reads the whole map: a linear layer by another name, as in timm's VGG
            convolved[id(border)] = place
    ends = _falling([trace.borders[place] for place in convolved.values()])
    first = next(iter(convolved.values()), None)
    return [_follow(trace, modules, convolved[id(end)]) for end in ends], (
        None if first is None else _follow(trace, modules, first)
    )


def _follow(trace: Trace, modules: dict[str, nn.Module], place: int) -> Border:
    """The last border of this resolution before the next convolution, or before the resolution changes."""
    found = trace.borders[place]
    for border in trace.borders[place + 1 :]:
        if border.side == "in" and isinstance(modules[border.path], _ConvNd):
            break
        if not _is_map(border) or _side(border) != _side(found):
            break
        found = border
    return found


def _preact(trace: Trace, modules: dict[str, nn.Module], end: Key) -> Key:
    """What the stage's last activation is given."""
    key = end
    while key in trace.activated:
        key, name = trace.activated[key]
        if name not in RESHAPES:
            return key
    normed = _next_norm(trace, modules, end)
    activated = {given for given, name in trace.activated.values() if name not in RESHAPES}
    return normed if normed is not None and normed in activated else end


def _next_norm(trace: Trace, modules: dict[str, nn.Module], key: Key) -> Key | None:
    """The result of the norm that reads this value."""
    for border in trace.borders:
        if border.side == "in" and border.key == key and "Norm" in type(modules[border.path]).__name__:
            return trace.other_side(border).key
    return None


def _site(trace: Trace, key: Key, channels_last: bool) -> Site | None:
    """Where hooks see this value: outermost first, a module's output before a module's input. None: at no border.

    A hook keeps what crossed in a module's last call. A module that passes on what it is given (an identity, a dropout in eval
    mode) did not make it.
    """
    seen = [
        border
        for border in trace.borders
        if border.key == key
        and border.path
        and trace.last(border.path, border.side) is border
        and (border.side == "in" or trace.other_side(border).key != key)
    ]
    if not seen:
        return None
    seen.sort(key=lambda border: (border.side == "in", border.path.count(".")))
    return Site(tuple(seen), channels_last)
