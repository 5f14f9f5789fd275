"""The batch norms that computed a model's values: their scale and shift tell how a pre-activation is distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from trainables.models.forward import dry_forward
from trainables.models.forward_trace import TensorVersion
from trainables.models.taps import Taps


def norms_before(model: nn.Module, names: Sequence[str], *, name: str, image_size: int) -> list[_BatchNorm | None]:
    """For each tap of `names` the batch norm whose output it reads, or whose output is the first summand of what it reads.

    In a residual block that is the last norm on its path, not the shortcut's. None where there is no such norm, or where it has
    no scale and shift. `name` is the model's, for messages.

    Raises:
        ModelError: the model has no such tap.
    """
    taps, recorder = Taps(model, names, name=name, image_size=image_size), _NormRecorder()
    try:
        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    stack.callback(module.register_forward_pre_hook(recorder.pre_hook, prepend=True).remove)
            stack.enter_context(taps.capture())
            stack.enter_context(recorder)
            dry_forward(model, image_size, training=False)
            return [recorder.norm_of(TensorVersion.of(value)) for value in taps.pop()]
    finally:
        taps.remove()


class _NormRecorder(TorchFunctionMode):
    """Records which values are outputs of batch norms, and the operands of sums."""

    def __init__(self) -> None:
        super().__init__()
        self._running: _BatchNorm | None = None
        self._norms: dict[TensorVersion, _BatchNorm] = {}
        self._operands: dict[TensorVersion, tuple[TensorVersion, ...]] = {}
        self._values: list[Any] = []
        """Every operand and result, so that no two have the same identity."""

    def pre_hook(self, module: _BatchNorm, args: tuple[Any, ...]) -> None:
        """A batch norm is about to run."""
        self._running = module

    def norm_of(self, version: TensorVersion) -> _BatchNorm | None:
        """The batch norm of a value, or of the first operand of a sum that has one."""
        norms = (self._norms.get(candidate) for candidate in (version, *self._operands.get(version, ())))
        return next((norm for norm in norms if norm is not None and norm.affine), None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        operands = tuple(TensorVersion.of(arg) for arg in args if isinstance(arg, Tensor))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._values += [args, result]
            if name == "batch_norm" and self._running is not None:
                self._norms[TensorVersion.of(result)] = self._running
            elif name in ("add", "iadd"):
                self._operands[TensorVersion.of(result)] = operands
        return result
