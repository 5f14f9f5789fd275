"""Record the calls of a model's modules in one forward pass on blank images (`forward.dry_forward`), as hooks see them.

Shapes: B batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainables.models.forward import dry_forward

BATCH = 3
Direction = Literal["in", "out"]


class Call(NamedTuple):
    """The first argument (`in`) or the result (`out`) of a module's call."""

    path: str
    """The module's dotted path; empty for the model itself."""
    direction: Direction
    value: Any
    version: int
    """Number of in-place changes of the tensor so far."""
    passed_on: bool
    """Whether the module returned its argument."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Empty if the value is not a tensor."""
        return tuple(self.value.shape) if isinstance(self.value, Tensor) else ()

    @property
    def has_rows(self) -> bool:
        """Whether the value is a tensor with a row for each sample."""
        return len(self.shape) > 1 and self.shape[0] == BATCH

    @property
    def overwritten(self) -> bool:
        """Whether the tensor, or a view of it, was changed in place afterwards."""
        return isinstance(self.value, Tensor) and self.value._version != self.version

    def is_same(self, other: Call) -> bool:
        """Whether both calls have the same value."""
        return self.value is other.value and self.version == other.version


def record_calls(model: nn.Module, image_size: int, *, training: bool) -> list[Call]:
    """Return the calls in order of time: `in` before and `out` after everything inside. The model stays unchanged.

    Batch norms use running statistics in both modes, as synchronized ones would wait for other ranks. All values are kept
    alive, so that their identities are distinct.
    """
    calls: list[Call] = []

    def record(path: str, direction: Direction) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], *result: Any) -> None:
            given = args[0] if args else None
            value = result[0] if result else given
            calls.append(Call(path, direction, value, getattr(value, "_version", 0), bool(result) and value is given))

        return hook

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(record(path, "in"), prepend=True).remove)
            stack.callback(module.register_forward_hook(record(path, "out")).remove)
        dry_forward(model, image_size, training=training, batch_size=BATCH, frozen=(_NormBase,))
    return calls


def last_call(calls: list[Call], path: str, direction: Direction) -> Call | None:
    """Return the module's last call, which is what a hook captures; None if it was not called."""
    return next((call for call in reversed(calls) if (call.path, call.direction) == (path, direction)), None)
