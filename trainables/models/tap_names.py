"""The names of taps, and where a model's values of these names can be read.

Names: `stem`; `stage1`, `stage2`, …, `stage-1` for the last; `stages` for all of them; `stage1.preact`, …, `stages.preact`;
`pooled`, the input of the final linear layer, (B, D); `unpooled`, the last map of D channels before it; or a module's dotted path
for its output, with `:in` for its input. `feature_stages` says what a stage is. A stage's name comes before an equal one of a
module (torchvision's ShuffleNetV2 has a module `stage2`).

Shapes: B batch, D features.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainables.errors import ModelError, closest_matches
from trainables.models.feature_stages import HookPoint, last_map, stage_hook_points
from trainables.models.forward_trace import BATCH, Trace, TraceEvent, inplace_disabled, trace_forward

STAGE = re.compile(r"stage(-?\d+)(\.preact)?")


@dataclass(frozen=True)
class TapInfo:
    name: str
    aliases: tuple[str, ...]
    """Other names of the same value."""
    shape: tuple[int, ...]
    """Of one sample."""


def list_taps(model: nn.Module, image_size: int, *, every: bool = False) -> list[TapInfo]:
    """The stem, stages, pre-activations and pooled features; with `every` the output of every module as well.

    Parameters, batch statistics, modes and generators stay as they are.
    """
    survey = TapSurvey(model, image_size, name=type(model).__name__)
    names_of: dict[tuple[TraceEvent, ...], list[str]] = {}
    for name, hook_point in survey.hook_points.items():
        if not hook_point.events[0].overwritten:  # by a function between modules: no hook reads it in time
            names_of.setdefault(hook_point.events, []).append(name)
    found = []
    for names in names_of.values():
        first, *others = sorted(names, key="stem".__eq__)
        hook_point = survey.hook_points[first]
        modules = [name for name in hook_point.names if not STAGE.fullmatch(name)]
        found.append(TapInfo(first, (*others, *modules), hook_point.shape))
    return found + (_module_outputs(survey.trace) if every else [])


def _module_outputs(trace: Trace) -> list[TapInfo]:
    paths = dict.fromkeys(event.path for event in trace.events if event.direction == "out" and event.path)
    found = []
    for path in paths:
        event = trace.last(path, "out")
        if event is not None and _has_rows(event) and not event.overwritten:
            found.append(TapInfo(path, (), event.shape[1:]))
    return found


def classifier(model: nn.Module) -> nn.Linear:
    """The final linear layer: timm's `get_classifier`, otherwise the last module with parameters of its own.

    Raises ModelError: that is no linear layer.
    """
    get_classifier = getattr(model, "get_classifier", None)
    if callable(get_classifier):
        last = get_classifier()
    else:
        with_parameters = (m for m in reversed(list(model.modules())) if next(m.parameters(recurse=False), None) is not None)
        last = next(with_parameters, None)
    if isinstance(last, nn.Linear):
        return last
    raise ModelError(
        f"{type(model).__name__} ends with {type(last).__name__}, not with a linear layer: choose a model that does, "
        "or a method that needs none"
    )


class TapSurvey:
    """The values of one forward pass that have names."""

    def __init__(self, model: nn.Module, image_size: int, *, name: str) -> None:
        """`name` is the model's, for messages."""
        self.name = name
        self._modules = dict(model.named_modules())
        with inplace_disabled(model):
            self.trace = trace_forward(model, image_size, training=False)
        self.hook_points = stage_hook_points(model, self.trace) | self._pooled(model)
        """The values with names other than a module's path."""
        if "pooled" in self.hook_points and "stage1" in self.hook_points:  # tokens are no map
            unpooled = last_map(self.trace, self.hook_points["pooled"].events[0])
            if unpooled is not None:
                self.hook_points["unpooled"] = unpooled

    def _pooled(self, model: nn.Module) -> dict[str, HookPoint]:
        try:
            last = classifier(model)
        except ModelError:
            return {}
        path = next(path for path, module in self._modules.items() if module is last)
        event = self.trace.last(path, "in")
        if event is None or len(event.shape) != 2:
            return {}
        return {"pooled": HookPoint((event,))}

    def expand(self, tap: str) -> list[str]:
        """`stages`, `stages.preact` and `stage-1` as numbered stages; any other name unchanged.

        Raises ModelError: the model has no stages.
        """
        numbered = STAGE.fullmatch(tap)
        if not numbered and tap not in ("stages", "stages.preact"):
            return [tap]
        count = sum(1 for name in self.hook_points if STAGE.fullmatch(name) and not name.endswith(".preact"))
        if not count:
            raise ModelError(
                f"model {self.name} has no {tap}: it makes no maps that shrink stage by stage; {self._known()}, or any"
                f" module's path: `distill taps {self.name} --all`"
            )
        if not numbered:
            return [tap.replace("stages", f"stage{number}") for number in range(1, count + 1)]
        number = int(numbered[1])
        return [f"stage{count + 1 + number}{numbered[2] or ''}"] if -count <= number < 0 else [tap]

    def find(self, tap: str) -> HookPoint:
        """Where to read the tap of this name, which is not one of several stages.

        Raises ModelError: there is none, or it is no tensor with a row for each sample; with the nearest names.
        """
        if tap in self.hook_points:
            return self.hook_points[tap]
        self._check_stage_name(tap)
        path, _, direction = tap.partition(":")
        if not path or path not in self._modules or direction not in ("", "in"):
            similar = closest_matches(tap, [*self.hook_points, *self._modules], count=3)
            nearest = f"the nearest are {' or '.join(similar)}" if similar else self._known()
            raise ModelError(f"model {self.name} has no tap {tap!r}: {nearest}; `distill taps {self.name} --all` lists them")
        event = self.trace.last(path, "in" if direction else "out")
        if event is None:
            raise ModelError(f"model {self.name}: {tap} is not called in eval mode; {self._known()}")
        if not isinstance(event.value, Tensor):
            kind = type(event.value).__name__
            raise ModelError(f"model {self.name}: {tap} is a {kind}, not a tensor; choose a module inside or outside of it")
        if not _has_rows(event):
            raise ModelError(
                f"model {self.name}: {tap} has shape {event.shape} for {BATCH} images, so its rows are no samples; choose a"
                " module outside of it"
            )
        return HookPoint((event,))

    def _check_stage_name(self, tap: str) -> None:
        """Refuse a name of a stage or of pooled features that this model does not have."""
        name, known = self.name, self._known()
        if tap.endswith(".preact") and tap.removesuffix(".preact") in self.hook_points:
            raise ModelError(
                f"model {name} has no {tap} that can be read: that activation is a function between modules, which no hook sees;"
                f" {known}"
            )
        if tap == "unpooled" and "pooled" in self.hook_points:
            raise ModelError(
                f"model {name} has no unpooled: what its linear layer reads was never a map of as many channels; {known}"
            )
        if tap in ("pooled", "unpooled"):
            raise ModelError(f"model {name} has no {tap}: it does not end with a linear layer on (B, D); {known}")

    def _known(self) -> str:
        return f"there are {', '.join(self.hook_points)}" if self.hook_points else "there are only modules"


def modules_before(model: nn.Module, tap: str, *, name: str, image_size: int) -> set[str]:
    """The paths of the modules that begin to run before the value of a tap is computed: no other has a part in it.

    Raises ModelError: no such tap.
    """
    survey = TapSurvey(model, image_size, name=name)
    (path,) = survey.expand(tap)
    found = survey.find(path).events[0]
    index = next(index for index, event in enumerate(survey.trace.events) if event is found)
    return {event.path for event in survey.trace.events[: index + 1] if event.direction == "in"}


def norms_before(model: nn.Module, names: Sequence[str], *, name: str, image_size: int) -> list[_BatchNorm | None]:
    """For each tap the batch norm whose output it reads, or whose output is the first summand of what it reads.

    In a residual block that is the last norm on its path, not the shortcut's. None where there is no such norm, or where it has
    no scale and shift. `name` is the model's, for messages. Raises ModelError: the model has no such tap.
    """
    survey = TapSurvey(model, image_size, name=name)
    found = []
    for tap in chain.from_iterable(map(survey.expand, names)):
        version = survey.find(tap).events[0].version
        norms = (survey.trace.norms.get(value) for value in (version, *survey.trace.sums.get(version, ())))
        found.append(next((norm for norm in norms if isinstance(norm, _BatchNorm) and norm.affine), None))
    return found


def _has_rows(event: TraceEvent) -> bool:
    """Whether the value is a tensor with a row for each sample."""
    return len(event.shape) > 1 and event.shape[0] == BATCH
