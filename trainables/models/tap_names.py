"""The names of taps, and where a model's values of these names are read.

Names: `stem`; `stage1`, `stage2`, …, `stage-1` for the last; `stages` for all of them; `stage1.preact`, …, `stages.preact`, what
a stage's last activation reads; `pooled`, the input of the final linear layer, (B, D); `unpooled`, the map of D channels that
is pooled; or a module's dotted path for its output, with `:in` for its input. Where a model has its stages is declared by its
library (`libraries`). A stage's name comes before an equal one of a module (torchvision's ShuffleNetV2 has a module `stage2`).

Shapes: B batch, D features.
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainables.errors import ModelError, closest_matches
from trainables.models.libraries import declared_taps
from trainables.models.module_calls import BATCH, Call, last_call, record_calls

STAGE = re.compile(r"stage(-?\d+)(\.preact)?")
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.ELU)


@dataclass(frozen=True)
class TapInfo:
    name: str
    aliases: tuple[str, ...]
    """Other names of the same value."""
    shape: tuple[int, ...]
    """Of one sample."""


def last_layer(model: nn.Module) -> object:
    """timm's `get_classifier`, which may be several, otherwise the last module with parameters of its own."""
    get_classifier = getattr(model, "get_classifier", None)
    if callable(get_classifier):
        return get_classifier()
    return next((m for m in reversed(list(model.modules())) if next(m.parameters(recurse=False), None) is not None), None)


def classifier(model: nn.Module) -> nn.Linear:
    """The final linear layer. Raises ModelError: the model ends with something else."""
    last = last_layer(model)
    if isinstance(last, nn.Linear):
        return last
    raise ModelError(
        f"{type(model).__name__} ends with {type(last).__name__}, not with a linear layer: choose a model that does, "
        "or a method that needs none"
    )


class TapNames:
    """The taps of a model: names, paths of modules, and the values of one forward pass in eval mode."""

    def __init__(self, model: nn.Module, image_size: int, *, name: str) -> None:
        """`name` is the model's, for messages."""
        self.name = name
        self.calls = record_calls(model, image_size, training=False)
        self._modules = dict(model.named_modules())
        self._declared = declared_taps(model)
        self._preacts: dict[str, str] = {}
        """Block → what its last activation reads."""
        self._norms: dict[str, str | None] = {}
        """That → the block's last norm."""
        for path, module in self._modules.items():
            end = self._declared.blocks.get(f"{type(module).__module__}.{type(module).__name__}")
            if end is not None:
                self._preacts[path] = f"{path}.{end.preact}" if end.preact else path
                self._norms[self._preacts[path]] = f"{path}.{end.norm}" if end.norm else None
        self.paths = self._named_paths(model)
        """The taps with other names than a module's path → that, with `:in` for its input."""

    def _named_paths(self, model: nn.Module) -> dict[str, str]:
        stages = self._declared.stages
        paths = {"stem": self._declared.stem} if self._declared.stem is not None else {}
        paths |= {f"stage{number}": path for number, path in enumerate(stages, start=1)}
        for number, path in enumerate(stages):
            preact = self._declared.preacts[number] if self._declared.preacts else self._preact(path)
            if preact is not None:
                paths[f"stage{number + 1}.preact"] = preact
        with contextlib.suppress(ModelError):
            last = classifier(model)
            pooled = next(f"{path}:in" for path, module in self._modules.items() if module is last)
            if (call := self.last_call(pooled)) is not None and len(call.shape) == 2:
                paths["pooled"] = pooled
            if "pooled" in paths and (unpooled := self._declared.unpooled) is not None:
                call = self.last_call(unpooled)
                if call is not None and len(call.shape) == 4 and self._sample_shape(call)[0] == last.in_features:
                    paths["unpooled"] = unpooled
        return paths

    def expand(self, tap: str) -> list[str]:
        """`stages`, `stages.preact` and `stage-1` as numbered stages; any other name unchanged.

        Raises ModelError: the model has no stages.
        """
        numbered = STAGE.fullmatch(tap)
        if not numbered and tap not in ("stages", "stages.preact"):
            return [tap]
        count = len(self._declared.stages)
        if not count:
            raise ModelError(
                f"model {self.name} has no {tap}: no stages of it are declared; {self._known()}, or any module's path: "
                f"`distill taps {self.name} --all`"
            )
        if not numbered:
            return [tap.replace("stages", f"stage{number}") for number in range(1, count + 1)]
        number = int(numbered[1])
        return [f"stage{count + 1 + number}{numbered[2] or ''}"] if -count <= number < 0 else [tap]

    def find(self, tap: str) -> Call:
        """The call that has the value of a tap, which is not one of several stages.

        Raises ModelError: no such tap (with the nearest names), it is not called, or no tensor with a row for each sample.
        """
        call = self.last_call(self._path(tap))
        where = f"model {self.name}: {tap}"
        if call is None:
            raise ModelError(f"{where} is not called in eval mode; {self._known()}")
        if not call.shape:
            raise ModelError(f"{where} is a {type(call.value).__name__}, not a tensor; choose a module inside or outside of it")
        if not call.has_rows:
            raise ModelError(
                f"{where} has shape {call.shape} for {BATCH} images, so its rows are no samples; choose a module outside of it"
            )
        return call

    def shape(self, tap: str) -> tuple[int, ...]:
        """The shape of one sample, as a tap returns it. Raises ModelError as `find` does."""
        call = self.find(tap)
        return self._sample_shape(call) if self.is_channels_last(tap) else call.shape[1:]

    def is_channels_last(self, tap: str) -> bool:
        """Whether the value is a map (B, H, W, C), which a tap returns as (B, C, H, W); a module's path is read as it is."""
        return self._declared.channels_last and tap in self.paths and tap != "pooled"

    def norm(self, tap: str) -> _BatchNorm | None:
        """The batch norm whose output a tap reads, alone or as the main branch of a sum; None: none with scale and shift."""
        path = self._path(tap)
        parent, _, index = path.removesuffix(":in").rpartition(".")
        if path in self._norms:
            path = self._norms[path] or path
        elif path.endswith(":in") and isinstance(self._modules[parent], nn.Sequential) and index.isdecimal():
            path = f"{parent}.{int(index) - 1}"
        norm = self._modules.get(self._last(path))
        return norm if isinstance(norm, _BatchNorm) and norm.affine else None

    def _preact(self, path: str) -> str | None:
        """What the last activation of a stage reads, or its output where it ends without one; None: that is not declared."""
        last = self._last(path)
        if last in self._preacts:
            return self._preacts[last]
        return f"{last}:in" if isinstance(self._modules.get(last), ACTIVATIONS) else None

    def _last(self, path: str) -> str:
        """The last module in a Sequential, and in one that this is, but not in a declared block; any other module itself."""
        module = self._modules.get(path)
        if path in self._preacts or not isinstance(module, nn.Sequential) or not len(module):
            return path
        return self._last(f"{path}.{next(reversed(dict(module.named_children())))}")

    def _path(self, tap: str) -> str:
        if tap in self.paths:
            return self.paths[tap]
        name, known = self.name, self._known()
        if tap.endswith(".preact") and tap.removesuffix(".preact") in self.paths:
            raise ModelError(f"model {name} has no {tap}: how its stages end is not declared; {known}")
        if tap == "unpooled" and "pooled" in self.paths:
            raise ModelError(f"model {name} has no unpooled: its linear layer does not read the mean of a map; {known}")
        if tap in ("pooled", "unpooled"):
            raise ModelError(f"model {name} has no {tap}: it does not end with a linear layer on (B, D); {known}")
        path, _, direction = tap.partition(":")
        if path and path in self._modules and direction in ("", "in"):
            return tap
        similar = closest_matches(tap, [*self.paths, *self._modules], count=3)
        nearest = f"the nearest are {' or '.join(similar)}" if similar else known
        raise ModelError(f"model {name} has no tap {tap!r}: {nearest}; `distill taps {name} --all` lists them")

    def last_call(self, tap: str) -> Call | None:
        path, _, direction = tap.partition(":")
        return last_call(self.calls, path, "in" if direction else "out")

    def _sample_shape(self, call: Call) -> tuple[int, ...]:
        shape = call.shape[1:]
        return (shape[2], *shape[:2]) if self._declared.channels_last and len(shape) == 3 else shape

    def _known(self) -> str:
        return f"there are {', '.join(self.paths)}" if self.paths else "there are only modules"


def list_taps(model: nn.Module, image_size: int, *, every: bool = False) -> list[TapInfo]:
    """The stem, stages, pre-activations and pooled features; with `every` the output of every module as well.

    Parameters, batch statistics, modes and generators stay as they are; modules with an `inplace` flag work out of place.
    """
    disable_inplace(model)
    names = TapNames(model, image_size, name=type(model).__name__)
    outputs = {call.path: call for call in names.calls if call.direction == "out" and call.path}
    outputs = {path: call for path, call in outputs.items() if call.has_rows and not call.overwritten}
    groups: list[tuple[Call, list[str]]] = []
    for name, path in names.paths.items():
        call = names.last_call(path)
        if call is not None and call.has_rows and not call.overwritten:
            same = next((known for other, known in groups if other.is_same(call)), None)
            if same is None:
                groups.append((call, [name]))
            else:
                same.append(name)
    found = []
    for call, group in groups:
        first, *others = sorted(group, key="stem".__eq__)
        modules = [
            path for path, other in outputs.items() if other.is_same(call) and not other.passed_on and not STAGE.fullmatch(path)
        ]
        modules.sort(key=lambda path: path.count("."))
        found.append(TapInfo(first, (*others, *(modules or [names.paths[first]])), names.shape(first)))
    return found + ([TapInfo(path, (), call.shape[1:]) for path, call in outputs.items()] if every else [])


def disable_inplace(model: nn.Module) -> None:
    """Modules with an `inplace` flag work out of place from now on: hooks then read what is not overwritten, bit for bit."""
    for module in model.modules():
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # type: ignore[assignment]


def modules_before(model: nn.Module, tap: str, *, name: str, image_size: int) -> set[str]:
    """The paths of the modules that begin to run before the value of a tap is computed: no other has a part in it.

    Raises ModelError: no such tap.
    """
    names = TapNames(model, image_size, name=name)
    (tap,) = names.expand(tap)
    found = names.find(tap)
    end = next(index for index, call in enumerate(names.calls) if call is found)
    return {call.path for call in names.calls[: end + 1] if call.direction == "in"}


def norms_before(model: nn.Module, taps: Sequence[str], *, name: str, image_size: int) -> list[_BatchNorm | None]:
    """For each tap the batch norm whose output it reads, alone or as the main branch of a sum.

    None where none is known, or it has no scale and shift. `name` is the model's. Raises ModelError: the model has no such tap.
    """
    names = TapNames(model, image_size, name=name)
    return [names.norm(tap) for tap in chain.from_iterable(map(names.expand, taps))]
