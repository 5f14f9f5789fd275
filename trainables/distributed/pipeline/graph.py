"""Trace a model's forward pass with `torch.fx`, and find the modules of its nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from trainables.errors import ModelError


class _Tracer(fx.Tracer):
    """Traces into all modules, or only those in `expand`, except those in `opaque`."""

    def __init__(self, opaque: Collection[str], expand: Collection[str] | None) -> None:
        super().__init__()
        self._opaque, self._expand = opaque, expand
        self.failed_in: str | None = None
        """The innermost module whose forward raised."""

    def create_args_for_root(self, forward: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Pass only the images: other arguments of a forward, such as an attention mask, have their defaults."""
        return forward, [self.root, self.create_proxy("placeholder", "images", (), {})]

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        if path in self._opaque or (self._expand is not None and path not in self._expand):
            return True
        # Also subclasses from libraries: tracing into one would increment `num_batches_tracked`.
        return isinstance(module, nn.modules.batchnorm._BatchNorm) or super().is_leaf_module(module, path)

    def call_module(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(module, forward, args, kwargs)
        except Exception:
            if self.failed_in is None:
                self.failed_in = self.path_of_module(module)
            raise


def trace(model: nn.Module, expand: Collection[str] | None = None) -> fx.Graph:
    """Trace the model's forward in its current mode.

    `expand` names the modules to trace into: by default all except torch's own layers and those that cannot be traced.

    Raises ModelError: the top-level forward cannot be traced.
    """
    opaque: set[str] = set()
    while True:
        tracer = _Tracer(opaque, expand)
        try:
            return tracer.trace(model)
        except Exception as error:  # a forward may raise anything when it is called with proxies
            if tracer.failed_in is None or tracer.failed_in in opaque:
                raise cannot_be_cut(model, error) from error
            opaque.add(tracer.failed_in)


def cannot_be_cut(model: nn.Module, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0].partition(". ")[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"{type(model).__name__} cannot be cut into pipeline stages ({reason}): choose another model, or write"
        " scale.pipeline_stages 1"
    )


def module_paths(node: fx.Node) -> tuple[str, ...]:
    """Return the modules whose forward contains a node, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()] if stack else []
    own = [str(node.target)] if node.op == "call_module" else []
    return tuple(dict.fromkeys([*(path for path in paths if path), *own]))


def tensor_ids(member: nn.Module | Tensor | None) -> set[int]:
    """Return the ids of a module's parameters and buffers, or of a single tensor."""
    if isinstance(member, nn.Module):
        return {id(tensor) for tensor in (*member.parameters(), *member.buffers())}
    return {id(member)} if isinstance(member, Tensor) else set()


@contextmanager
def mode_of(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into training or eval mode, and restore the mode of each of its modules at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
