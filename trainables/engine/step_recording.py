"""What a step, or a part of it, runs, operation by operation: whether the next one could be a replay of it.

A replayed step reads and writes the same memory with the same numbers. So two steps must be the same sequence of operations, on
tensors of the same shapes, with the same Python numbers; none may need a value on the host, and none may make a new tensor out
of numbers that the host has. What changes between steps has to be in tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Operation = tuple[Any, ...]
"""Its name, and its arguments: numbers as they are, tensors by shape, dtype and kind of device."""

_ON_HOST = frozenset(["_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal"])
_SOLVERS = ("_linalg", "linalg_", "svd", "cholesky", "geqrf", "triangular_solve")
"""Beginnings of names: on a GPU these check on the host whether they have converged."""
_NO_SOLVERS = ("linalg_vector_norm", "linalg_cross", "linalg_vecdot")


class StepRecording(TorchDispatchMode):
    """Records the operations of the step inside it, backward included."""

    def __init__(self, module: nn.Module) -> None:
        """`module`: whose parameters and buffers the step changes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.problem: str | None = None
        """Why the step cannot be replayed, whatever the next one runs."""
        self._module, self._state = module, list(_named_state(module))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for (name, before, address), (_, after, address_after) in zip(self._state, _named_state(self._module), strict=True):
            if before is not after or address != address_after:
                self._add_problem(f"{name} is replaced by another tensor, not changed in place")
        self._state = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        self.operations.append((str(func), *map(_described, args), *(_described(item) for item in kwargs.items())))
        if name in _ON_HOST or (name.startswith(_SOLVERS) and not name.startswith(_NO_SOLVERS)):
            self._add_problem(f"{name} waits for the device")
        if func.namespace in ("c10d", "_c10d_functional"):
            self._add_problem(f"the workers exchange tensors within it ({name})")
        if name in ("lift_fresh", "lift"):
            self._add_problem("a tensor is made of numbers of the host")
        if name.startswith(("index", "_index_put")) and any(_is_mask(arg) for arg in args):
            self._add_problem(f"{name} by a mask waits for the device")
        return func(*args, **kwargs)

    def difference(self, other: StepRecording) -> str | None:
        """The first operation in which another step differs from this one; None: it is the same step."""
        for ours, of_other in zip(self.operations, other.operations, strict=False):
            if ours != of_other:
                return f"{ours[0]}{_changed(ours, of_other)} changes from step to step"
        if len(self.operations) != len(other.operations):
            return f"it runs {len(self.operations)} operations, then {len(other.operations)}"
        return None

    def _add_problem(self, problem: str) -> None:
        self.problem = self.problem or problem


def _named_state(module: nn.Module) -> Iterable[tuple[str, Tensor, int]]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [(name, tensor, tensor.data_ptr()) for name, tensor in tensors.items()]


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(_described(one) for one in value)
    if isinstance(value, bool | int | float | str | torch.dtype | torch.device | torch.memory_format) or value is None:
        return repr(value)
    return type(value).__name__


def _is_mask(argument: Any) -> bool:
    """Whether it is the indices of an advanced index with a mask among them."""
    return isinstance(argument, list | tuple) and any(
        isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in argument
    )


def _changed(one: Operation, other: Operation) -> str:
    """The first numbers that differ, in brackets."""
    if one[0] != other[0]:
        return f" (then {other[0]})"
    pairs = (f" ({a} then {b})" for a, b in zip(one[1:], other[1:], strict=False) if a != b)
    return next(pairs, "")
