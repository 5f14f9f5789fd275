"""A trace of one forward pass: the input and output tensors of every module, and the activations and merges between them.

The pass runs on blank images (`forward.dry_forward`). Hooks on all modules record their inputs and outputs, a function mode
records the functions in between. A value is identified by its tensor's identity and version, since a tensor that is changed in
place has another value from then on.

Shapes: B batch, C channels, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from trainables.models.forward import dry_forward

BATCH = 3
ACTIVATIONS = {
    "relu",
    "relu6",
    "hardtanh",
    "silu",
    "gelu",
    "hardswish",
    "prelu",
    "leaky_relu",
    "elu",
    "celu",
    "selu",
    "mish",
    "softplus",
    "tanh",
}
RESHAPES = {
    "view",
    "reshape",
    "transpose",
    "permute",
    "contiguous",
    "flatten",
    "unflatten",
    "swapaxes",
    "movedim",
    "channel_shuffle",
}
MERGES = {"add", "iadd", "sub", "cat", "concat", "concatenate"}
"""Functions that merge branches: residual sums and concatenations."""
_RECORDED = ACTIVATIONS | RESHAPES | MERGES | {"batch_norm"}

Direction = Literal["in", "out"]


class TensorVersion(NamedTuple):
    """One value of a tensor: its identity, and how often it was changed in place before."""

    tensor_id: int
    version: int

    @staticmethod
    def of(value: Any) -> TensorVersion:
        """Of a tensor; of anything else its identity alone."""
        return TensorVersion(id(value), value._version if isinstance(value, Tensor) else 0)


@dataclass(frozen=True)
class TraceEvent:
    """The first argument (`in`) or the result (`out`) of one call of a module."""

    path: str
    """The module's dotted path; empty for the model itself."""
    direction: Direction
    call: int
    """1 for the module's first call."""
    value: Any
    version: TensorVersion

    @property
    def shape(self) -> tuple[int, ...]:
        """Empty where the value is no tensor."""
        return tuple(self.value.shape) if isinstance(self.value, Tensor) else ()

    @property
    def overwritten(self) -> bool:
        """Whether the tensor was changed in place afterwards."""
        return TensorVersion.of(self.value) != self.version

    @property
    def tap_name(self) -> str:
        return self.path if self.direction == "out" else f"{self.path}:in"


@dataclass
class Trace:
    """One forward pass. It keeps every tensor alive, so that no two have the same identity."""

    events: list[TraceEvent] = field(default_factory=list)
    """In the order of time: `in` before and `out` after everything inside the call."""
    produced_by: dict[TensorVersion, tuple[TensorVersion, str]] = field(default_factory=dict)
    """The result of an activation or a reshape → its input and the name of the function."""
    norms: dict[TensorVersion, nn.Module] = field(default_factory=dict)
    """The result of a batch normalisation → the module that computed it."""
    sums: dict[TensorVersion, tuple[TensorVersion, ...]] = field(default_factory=dict)
    """The result of a sum → its summands."""
    merging_classes: set[type[nn.Module]] = field(default_factory=set)
    """Classes of modules whose own forward merges branches."""
    image: TensorVersion | None = None
    """The model's input."""
    values: list[Any] = field(default_factory=list)
    """The arguments and results of functions."""

    def last(self, path: str, direction: Direction) -> TraceEvent | None:
        """The event of the module's last call, which is what a hook has in the end. None: the module did not run."""
        matching = (event for event in reversed(self.events) if (event.path, event.direction) == (path, direction))
        return next(matching, None)

    def counterpart(self, event: TraceEvent) -> TraceEvent:
        """The input of the call that has this output, or its output."""
        same_call = (other for other in self.events if (other.path, other.call) == (event.path, event.call))
        return next(other for other in same_call if other.direction != event.direction)


class _FunctionRecorder(TorchFunctionMode):
    """Records activations, reshapes and merges of maps and tokens in a trace."""

    def __init__(self, trace: Trace, running: list[nn.Module]) -> None:
        """`running`: the modules that are being called, outermost first."""
        super().__init__()
        self._trace, self._running = trace, running

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        sources = tuple(TensorVersion.of(arg) for arg in args if isinstance(arg, Tensor))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and name in _RECORDED:
            trace, version = self._trace, TensorVersion.of(result)
            trace.values += [args, result]
            if name == "batch_norm":
                trace.norms[version] = self._running[-1]
            elif name in MERGES:
                if name in ("add", "iadd"):
                    trace.sums[version] = sources
                if len(self._running) > 1 and _merges_branches(args):
                    trace.merging_classes.add(type(self._running[-1]))
            elif sources and version != sources[0]:
                trace.produced_by[version] = (sources[0], name)
        return result


def _merges_branches(args: tuple[Any, ...]) -> bool:
    parts = [part for arg in args for part in (arg if isinstance(arg, list | tuple) else (arg,))]
    return sum(isinstance(part, Tensor) and not isinstance(part, nn.Parameter) and part.ndim >= 3 for part in parts) > 1


class _ModuleRecorder:
    """Records the inputs and outputs of modules in a trace, by hooks."""

    def __init__(self, trace: Trace, running: list[nn.Module]) -> None:
        self._trace, self._running = trace, running
        self._calls: dict[str, int] = {}

    def pre_hook(self, path: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(module)
            self._calls[path] = self._calls.get(path, 0) + 1
            value = args[0] if args else None
            if self._trace.image is None and isinstance(value, Tensor):
                self._trace.image = TensorVersion.of(value)
            self._record(path, "in", value)

        return record

    def hook(self, path: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            self._running.pop()
            self._record(path, "out", result)

        return record

    def _record(self, path: str, direction: Direction, value: Any) -> None:
        self._trace.events.append(TraceEvent(path, direction, self._calls[path], value, TensorVersion.of(value)))


def trace_forward(model: nn.Module, image_size: int, *, training: bool) -> Trace:
    """The trace of a forward pass of (BATCH, 3, image_size, image_size). It leaves the model as it was.

    Batch norms use their running statistics in both modes: synchronised ones would wait for other ranks.
    """
    trace, running = Trace(), list[nn.Module]()
    recorder = _ModuleRecorder(trace, running)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(recorder.pre_hook(path), prepend=True).remove)
            stack.callback(module.register_forward_hook(recorder.hook(path)).remove)
        stack.enter_context(_FunctionRecorder(trace, running))
        dry_forward(model, image_size, training=training, batch_size=BATCH, frozen=(_NormBase,))
    return trace


@contextmanager
def inplace_disabled(model: nn.Module) -> Iterator[None]:
    """Modules with an `inplace` flag work out of place: the result of an activation is then another tensor than its input."""
    switched = [module for module in model.modules() if getattr(module, "inplace", None) is True]
    try:
        for module in switched:
            module.inplace = False  # type: ignore[assignment]
        yield
    finally:
        for module in switched:
            module.inplace = True  # type: ignore[assignment]
