"""The batch norm that made a value of a model: of a pre-activation, what says how it is distributed.

Shapes: C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from trainables.models.forward import dry_forward
from trainables.models.forward_trace import TensorVersion, key_of
from trainables.models.taps import Taps


def norms_before(model: nn.Module, names: Sequence[str], *, name: str, image_size: int) -> list[_BatchNorm | None]:
    """For each tap of `names` the batch norm whose output it reads, or whose output is the first of the two that it sums.

    Of a residual block that is the last norm on its path, not the shortcut's. None where there is no such norm, or where it has
    no scale and shift. `name` is the model's, for messages.

    Raises:
        ModelError: the model has no such tap.
    """
    taps, origins = Taps(model, names, name=name, image_size=image_size), _Origins()
    try:
        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    stack.callback(module.register_forward_pre_hook(origins.enter, prepend=True).remove)
            stack.enter_context(taps.capture())
            stack.enter_context(origins)
            dry_forward(model, image_size, training=False)
            return [origins.norm_of(key_of(value)) for value in taps.pop()]
    finally:
        taps.remove()


class _Origins(TorchFunctionMode):
    """Notes which values are a batch norm's, and which are sums of what."""

    def __init__(self) -> None:
        super().__init__()
        self._running: _BatchNorm | None = None
        self._normed: dict[TensorVersion, _BatchNorm] = {}
        self._summed: dict[TensorVersion, tuple[TensorVersion, ...]] = {}
        self._held: list[Any] = []
        """Every operand, so that no identity is given twice."""

    def enter(self, module: _BatchNorm, args: tuple[Any, ...]) -> None:
        """A batch norm is about to run."""
        self._running = module

    def norm_of(self, value: TensorVersion) -> _BatchNorm | None:
        made = (value, *self._summed.get(value, ()))
        return next((norm for key in made if (norm := self._normed.get(key)) is not None and norm.affine), None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        given = tuple(key_of(arg) for arg in args if isinstance(arg, Tensor))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._held += [args, result]
            if name == "batch_norm" and self._running is not None:
                self._normed[key_of(result)] = self._running
            elif name in ("add", "iadd"):
                self._summed[key_of(result)] = given
        return result
