"""What runs in a model's forward: every tensor that crosses a module's border, and which activation or sum made it.

One forward on blank images tells (`registry.dry_forward`): hooks on all modules see borders, a function mode sees the functions
in between. Tensors are told apart by identity and version, since one that is changed in place is another value from then on.

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
JOINS = {"add", "iadd", "sub", "cat", "concat", "concatenate"}
"""How branches meet again: residual sums and concatenations."""

Direction = Literal["in", "out"]


class TensorVersion(NamedTuple):
    """One value: a tensor's identity, and how often it had been changed in place."""

    tensor_id: int
    version: int


@dataclass(frozen=True)
class TraceEvent:
    """A tensor that went into (its first argument) or came out of a module's call. `value` is None where that is no tensor."""

    path: str
    direction: Direction
    call: int
    value: Tensor | None
    key: TensorVersion | None
    kind: str
    """Type of what crossed."""

    @property
    def overwritten(self) -> bool:
        """Whether the tensor was changed in place afterwards."""
        return self.value is not None and self.key is not None and self.value._version != self.key.version

    @property
    def name(self) -> str:
        """How a tap is written that reads it."""
        return self.path if self.direction == "out" else f"{self.path}:in"


@dataclass
class Trace:
    """One forward. Holds every tensor, so that no identity is given twice."""

    events: list[TraceEvent] = field(default_factory=list)
    """In the order of time; `in` before everything inside the call, `out` after it."""
    produced_by: dict[TensorVersion, tuple[TensorVersion, str]] = field(default_factory=dict)
    """From an activation's or a reshaping's result to (what it was given, the function's name)."""
    merging_classes: set[type[nn.Module]] = field(default_factory=set)
    """Classes of modules in whose own forward branches meet."""
    image: TensorVersion | None = None
    held: list[Tensor] = field(default_factory=list)

    def last(self, path: str, direction: Direction) -> TraceEvent | None:
        """What crossed in the module's last call: what a hook has in the end. None: the module did not run."""
        return next((event for event in reversed(self.events) if (event.path, event.direction) == (path, direction)), None)

    def other_side(self, event: TraceEvent) -> TraceEvent:
        """What went into the call that this came out of, or the other way round."""
        return next(
            other
            for other in self.events
            if (other.path, other.call) == (event.path, event.call) and other.direction != event.direction
        )


def key_of(tensor: Tensor) -> TensorVersion:
    return TensorVersion(id(tensor), tensor._version)


class _Functions(TorchFunctionMode):
    """Notes activations, reshapings and joins of maps and tokens."""

    def __init__(self, trace: Trace, running: list[nn.Module]) -> None:
        super().__init__()
        self._trace, self._running = trace, running

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        given = key_of(args[0]) if args and isinstance(args[0], Tensor) else None
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            if given is not None and (name in ACTIVATIONS or name in RESHAPES) and key_of(result) != given:
                self._trace.held += [args[0], result]
                self._trace.produced_by[key_of(result)] = (given, name)
            elif name in JOINS and len(self._running) > 1 and _joined(args):
                self._trace.merging_classes.add(type(self._running[-1]))
        return result


def _joined(args: tuple[Any, ...]) -> bool:
    """Whether two or more maps or tokens came together."""
    parts = [part for arg in args for part in (arg if isinstance(arg, list | tuple) else (arg,))]
    return sum(isinstance(part, Tensor) and not isinstance(part, nn.Parameter) and part.ndim >= 3 for part in parts) > 1


def trace_forward(model: nn.Module, image_size: int, *, training: bool) -> Trace:
    """One forward of (BATCH, 3, image_size, image_size), nothing of it left behind.

    Batch norms take their running statistics in both modes: synchronised ones would wait for other ranks.
    """
    trace, running = Trace(), list[nn.Module]()
    calls: dict[str, int] = {}

    def cross(path: str, direction: Direction, what: Any) -> None:
        value = what if isinstance(what, Tensor) else None
        key = key_of(value) if value is not None else None
        trace.events.append(TraceEvent(path, direction, calls[path], value, key, type(what).__name__))

    def before(path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            running.append(module)
            calls[path] = calls.get(path, 0) + 1
            given = args[0] if args else None
            if trace.image is None and isinstance(given, Tensor):
                trace.image = key_of(given)
            cross(path, "in", given)

        return enter

    def after(path: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            running.pop()
            cross(path, "out", result)

        return leave

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(before(path), prepend=True).remove)
            stack.callback(module.register_forward_hook(after(path)).remove)
        stack.enter_context(_Functions(trace, running))
        dry_forward(model, image_size, training=training, batch_size=BATCH, frozen=(_NormBase,))
    return trace


@contextmanager
def inplace_disabled(model: nn.Module) -> Iterator[None]:
    """Modules with an `inplace` flag work out of place: an activation's result is then another tensor than what it was given."""
    switched = [module for module in model.modules() if getattr(module, "inplace", None) is True]
    try:
        for module in switched:
            module.inplace = False  # type: ignore[assignment]
        yield
    finally:
        for module in switched:
            module.inplace = True  # type: ignore[assignment]
