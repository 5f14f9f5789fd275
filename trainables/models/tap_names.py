"""Resolve tap names to the modules of a model.

A tap is one of:
- `stem`; `stage1`, `stage2`, …, or `stage-1` for the last; `stages` for all of them;
- `stage1.preact`, …, `stages.preact`: the input of a stage's last activation;
- `map` (B, C, H, W): the last feature map, or a transformer's patch tokens after the final norm;
- `embedding` (B, D): the output of attention pooling or of a norm after pooling, the class token after the final norm, or the
  mean of `map`;
- `pooled`: the input of the final linear layer, or the output of a model without one;
- `unpooled`: `map`, if its mean is as wide as `pooled`;
- a module's dotted path for its output, with `:in` for its input.

Each model library declares where these are (`libraries`). A stage's name wins over a module of the same name (torchvision's
ShuffleNetV2 has a module `stage2`).

Shapes: B batch, C channels, D features, H W positions.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainables.errors import ModelError, closest_matches
from trainables.models.forward import COSINES, has_classifier
from trainables.models.libraries import library_of_class
from trainables.models.libraries.blocks import BLOCKS
from trainables.models.libraries.interface import Tap, as_is
from trainables.models.module_calls import BATCH, Call, last_call, record_calls

STAGE = re.compile(r"stage(-?\d+)(\.preact)?")
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.ELU)


@dataclass(frozen=True)
class TapInfo:
    name: str
    aliases: tuple[str, ...]
    """Other names of the same activation."""
    shape: tuple[int, ...]
    """The shape of one sample."""


def last_layer(model: nn.Module) -> object:
    """Return what timm's `get_classifier` does (maybe several layers), otherwise the last module with its own parameters."""
    get_classifier = getattr(model, "get_classifier", None)
    if callable(get_classifier):
        return get_classifier()
    return next((m for m in reversed(list(model.modules())) if next(m.parameters(recurse=False), None) is not None), None)


def classifier(model: nn.Module) -> nn.Linear:
    """Return the final linear layer. Raises ModelError: the model has no classifier, or not a linear one."""
    if not has_classifier(model):
        raise ModelError(f"{type(model).__name__} has no classifier: give it classes, or choose a method that needs none")
    last = last_layer(model)
    if isinstance(last, nn.Linear):
        return last
    raise ModelError(
        f"{type(model).__name__} ends with {type(last).__name__}, not with a linear layer: choose a model with a linear "
        "classifier, or a method that needs none"
    )


def without_classifier(model: nn.Module) -> nn.Module:
    """Replace the classifier in place: the model now returns pooled features (B, D), and its `num_classes` is 0.

    Raises ModelError: the model does not end with a linear layer.
    """
    last = classifier(model)
    model.set_submodule(next(path for path, module in model.named_modules() if module is last), nn.Identity())
    model.num_classes = 0  # type: ignore[assignment]
    return model


class TapNames:
    """Resolves a model's taps, from the activations of one forward pass in eval mode."""

    def __init__(self, model: nn.Module, image_size: int, *, name: str) -> None:
        """`name` is the model's name for messages."""
        self.name = name
        self.calls = record_calls(model, image_size, training=False)
        self._modules = dict(model.named_modules())
        self._declared = library_of_class(model).taps(model)
        self._preacts: dict[str, str] = {}
        """Block path → path of its last activation's input."""
        self._norms: dict[str, str | None] = {}
        """That path → path of the block's last norm."""
        for path, module in self._modules.items():
            end = BLOCKS.get(f"{type(module).__module__}.{type(module).__name__}")
            if end is not None:
                self._preacts[path] = f"{path}.{end.preact}" if end.preact else path
                self._norms[self._preacts[path]] = f"{path}.{end.norm}" if end.norm else None
        self.taps = self._named_taps(model)
        """The named taps, such as `stage1`; a module's path is not among them."""

    def _named_taps(self, model: nn.Module) -> dict[str, Tap]:
        declared = self._declared
        as_map = declared.layout.map
        paths = {"stem": declared.stem} if declared.stem is not None else {}
        paths |= {f"stage{number}": path for number, path in enumerate(declared.stages, start=1)}
        for number, path in enumerate(declared.stages):
            preact = declared.preacts[number] if declared.preacts else self._preact(path)
            if preact is not None:
                paths[f"stage{number + 1}.preact"] = preact
        taps, pooled = {name: Tap(path, as_map) for name, path in paths.items()}, self._pooled(model)
        if declared.map is not None and len(self._shape(Tap(declared.map, as_map))) == 3:
            mean = Tap(declared.map, declared.layout.mean, "mean")
            last_map = Tap(declared.map, as_map, "patch tokens" if declared.layout.num_prefix_tokens else "")
            taps |= {"map": last_map, "embedding": declared.embedding or mean}
            if declared.embedding is None and pooled is not None and self._shape(pooled) == self._shape(mean):
                taps["unpooled"] = last_map
        return taps if pooled is None else {**taps, "embedding": taps.get("embedding", pooled), "pooled": pooled}

    def _pooled(self, model: nn.Module) -> Tap | None:
        """The `pooled` tap; None if the model does not end with a linear layer on (B, D)."""
        has_cosines = hasattr(model, COSINES)
        found = Tap(f"{COSINES}:in" if has_cosines else "")
        if has_classifier(model) and not has_cosines:
            try:
                last = classifier(model)
            except ModelError:
                return None
            found = Tap(next(f"{path}:in" for path, module in self._modules.items() if module is last))
        return found if len(self._shape(found)) == 1 else None

    def expand(self, tap: str) -> list[str]:
        """Expand `stages`, `stages.preact` and `stage-1` to numbered stages; other names stay as they are.

        Raises ModelError: the model's library declares no stages.
        """
        numbered = STAGE.fullmatch(tap)
        if not numbered and tap not in ("stages", "stages.preact"):
            return [tap]
        count = len(self._declared.stages)
        if not count:
            raise ModelError(
                f"model {self.name} has no {tap}: its stages are not declared; {self._known()}, or any module's path: run "
                f"`distill taps {self.name} --all`"
            )
        if not numbered:
            return [tap.replace("stages", f"stage{number}") for number in range(1, count + 1)]
        number = int(numbered[1])
        return [f"stage{count + 1 + number}{numbered[2] or ''}"] if -count <= number < 0 else [tap]

    def find(self, tap: str) -> Call:
        """Return the module call that a single tap reads.

        Raises ModelError: there is no such tap (the message names similar ones), its module is not called, or its value is not
        a tensor with a row for each sample.
        """
        call = self.last_call(self._path(tap))
        where = f"model {self.name}: {tap}"
        if call is None:
            raise ModelError(f"{where} is not called in eval mode; {self._known()}")
        if not call.shape:
            raise ModelError(f"{where} is a {type(call.value).__name__}, not a tensor; choose a module inside or around it")
        if not call.has_rows:
            raise ModelError(
                f"{where} has shape {call.shape} for {BATCH} images, so its rows are not samples; choose a module around it"
            )
        return call

    def value(self, tap: str) -> Tensor:
        """Return a tap's value for `BATCH` blank images. Raises ModelError as `find` does."""
        return self.read(tap)(self.find(tap).value)

    def shape(self, tap: str) -> tuple[int, ...]:
        """Return the shape of one sample at a tap. Raises ModelError as `find` does."""
        return tuple(self.value(tap).shape[1:])

    def read(self, tap: str) -> Callable[[Tensor], Tensor]:
        """Return the function from a call's value to the tap's; the identity for a module's path."""
        return self.taps[tap].read if tap in self.taps else as_is

    def norm(self, tap: str) -> _BatchNorm | None:
        """Return the affine batch norm whose output a tap reads, alone or as a sum's main branch, or None."""
        path = self._path(tap)
        parent, _, index = path.removesuffix(":in").rpartition(".")
        if path in self._norms:
            path = self._norms[path] or path
        elif path.endswith(":in") and isinstance(self._modules[parent], nn.Sequential) and index.isdecimal():
            path = f"{parent}.{int(index) - 1}"
        norm = self._modules.get(self._last(path))
        return norm if isinstance(norm, _BatchNorm) and norm.affine else None

    def _preact(self, path: str) -> str | None:
        """Path of the input of a stage's last activation, or of its output if it ends without one; None if not declared."""
        last = self._last(path)
        if last in self._preacts:
            return self._preacts[last]
        return f"{last}:in" if isinstance(self._modules.get(last), ACTIVATIONS) else None

    def _last(self, path: str) -> str:
        """Descend to the last module of nested Sequentials, stopping at declared blocks and other modules."""
        module = self._modules.get(path)
        if path in self._preacts or not isinstance(module, nn.Sequential) or not len(module):
            return path
        return self._last(f"{path}.{next(reversed(dict(module.named_children())))}")

    def _path(self, tap: str) -> str:
        if tap in self.taps:
            return self.taps[tap].path
        name, known = self.name, self._known()
        if tap.endswith(".preact") and tap.removesuffix(".preact") in self.taps:
            raise ModelError(f"model {name} has no {tap}: its last activation is not declared; {known}")
        if tap == "unpooled" and "pooled" in self.taps:
            raise ModelError(f"model {name} has no unpooled: its classifier does not read the mean of a map; {known}")
        if tap in ("pooled", "unpooled"):
            raise ModelError(f"model {name} has no {tap}: it does not end with a linear layer on (B, D); {known}")
        path, _, direction = tap.partition(":")
        if path and path in self._modules and direction in ("", "in"):
            return tap
        if tap in ("map", "embedding"):
            raise ModelError(f"model {name} has no {tap}: its last map is not declared; {known}")
        similar = closest_matches(tap, [*self.taps, *self._modules], count=3)
        nearest = f"did you mean {' or '.join(similar)}?" if similar else f"{known};"
        raise ModelError(f"model {name} has no tap {tap!r}: {nearest} `distill taps {name} --all` lists them")

    def last_call(self, tap: str) -> Call | None:
        path, _, direction = tap.partition(":")
        return last_call(self.calls, path, "in" if direction else "out")

    def _shape(self, tap: Tap) -> tuple[int, ...]:
        """The shape of one sample; empty if the value has no row for each sample."""
        call = self.last_call(tap.path)
        return tuple(tap.read(call.value).shape[1:]) if call is not None and call.has_rows else ()

    def _known(self) -> str:
        return f"it has {', '.join(self.taps)}" if self.taps else "it has only module paths"


def list_taps(model: nn.Module, image_size: int, *, every: bool = False) -> list[TapInfo]:
    """List the stem, stages, pre-activations and pooled features, and with `every` also the output of every module.

    Parameters, batch statistics, modes and generators stay unchanged, but modules with an `inplace` flag work out of place.
    """
    disable_inplace(model)
    names = TapNames(model, image_size, name=type(model).__name__)
    outputs = {call.path: call for call in names.calls if call.direction == "out" and call.path}
    outputs = {path: call for path, call in outputs.items() if call.has_rows and not call.overwritten}
    groups: list[tuple[Call, Tap, list[str]]] = []
    for name, tap in names.taps.items():
        call = names.last_call(tap.path)
        if call is not None and call.has_rows and not call.overwritten:
            same = next((known for other, (_, _, what), known in groups if other.is_same(call) and what == tap.what), None)
            if same is None:
                groups.append((call, tap, [name]))
            else:
                same.append(name)
    found = []
    for call, tap, group in groups:
        first, *others = sorted(group, key="stem".__eq__)
        modules = [
            path for path, other in outputs.items() if other.is_same(call) and not other.passed_on and not STAGE.fullmatch(path)
        ]
        modules.sort(key=lambda path: path.count("."))
        modules = modules or [tap.path]
        found.append(TapInfo(first, (*others, *([f"{tap.what} of {modules[0]}"] if tap.what else modules)), names.shape(first)))
    return found + ([TapInfo(path, (), call.shape[1:]) for path, call in outputs.items()] if every else [])


def disable_inplace(model: nn.Module) -> None:
    """Switch off every module's `inplace` flag, so that what hooks read is not overwritten. Results stay bit-identical."""
    for module in model.modules():
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # type: ignore[assignment]


def modules_before(model: nn.Module, tap: str, *, name: str, image_size: int) -> set[str]:
    """Return the paths of the modules that start before a tap's value is complete: no other module contributes to it.

    Raises ModelError: the model has no such tap.
    """
    names = TapNames(model, image_size, name=name)
    (tap,) = names.expand(tap)
    found = names.find(tap)
    end = next(index for index, call in enumerate(names.calls) if call is found)
    return {call.path for call in names.calls[: end + 1] if call.direction == "in"}


def norms_before(model: nn.Module, taps: Sequence[str], *, name: str, image_size: int) -> list[_BatchNorm | None]:
    """Return for each tap the batch norm whose output it reads, alone or as the main branch of a sum.

    It is None if none is known or it is not affine. `name` is the model's. Raises ModelError: the model has no such tap.
    """
    names = TapNames(model, image_size, name=name)
    return [names.norm(tap) for tap in chain.from_iterable(map(names.expand, taps))]
