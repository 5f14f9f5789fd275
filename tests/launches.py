"""How many kernels a piece of code would launch on a GPU: its operations that compute something, views and allocations apart."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_NOTHING = frozenset(
    [
        *("view", "_unsafe_view", "_reshape_alias", "reshape", "alias", "detach", "as_strided", "as_strided_", "lift_fresh"),
        *("t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "unbind", "split", "chunk"),
        *("split_with_sizes", "promote_types", "_record_function_enter_new", "_record_function_exit"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    ]
)


class Launches(TorchDispatchMode):
    """Counts the operations inside it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.by_name[name] += name not in _NOTHING
        return func(*args, **(kwargs or {}))
