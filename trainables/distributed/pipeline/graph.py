"""Trace a model's forward pass with `torch.fx`, and split it into stages that share the model's modules and their names."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
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


def split(model: nn.Module, cuts: Sequence[str]) -> list[fx.GraphModule]:
    """Split a model, in its current mode, into stages that each begin with the module that a cut names.

    Each stage maps one tensor to one tensor: the first takes the images, the last returns the model's output. The stages share
    the model's modules and parameters under the same names. Modules without a cut inside are called as a whole.

    `cuts` come from `cut_points`, in that order. Raises ModelError: the forward cannot be traced.
    """
    expand = {cut.rsplit(".", count)[0] for cut in cuts for count in range(1, cut.count(".") + 1)}
    nodes = [node for node in trace(model, expand).nodes if node.op != "get_attr"]
    starts = [next(index for index, node in enumerate(nodes) if cut in module_paths(node)) for cut in cuts]
    bounds = itertools.pairwise([0, *starts, len(nodes)])
    return [fx.GraphModule(model, _part(nodes, *each), type(model).__name__) for each in bounds]


def _part(nodes: Sequence[fx.Node], first: int, end: int) -> fx.Graph:
    """Copy the nodes [first, end) into a graph with one input and one output tensor."""
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    before, inside, later = set(nodes[:first]), nodes[first:end], set(nodes[end:])
    if first:  # add the input first, as it has to precede all nodes
        (received,) = {node for other in inside for node in other.all_input_nodes if node in before}
        copies[received] = part.placeholder("received")

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter
            copies[node] = part.node_copy(node)
        return copies[node]

    for node in inside:
        copies[node] = part.node_copy(node, copied)
    if later:
        (sent,) = (node for node in inside if not later.isdisjoint(node.users))
        part.output(copies[sent])
    return part


def become_stage(model: nn.Module, cuts: Sequence[str], index: int) -> None:
    """Turn a model into one of its stages, see `split`, and drop the parameters and buffers of the others.

    Tensors that no stage uses stay. There is a graph for each mode, since some models compute more in training.
    """
    parts = {}
    for training in (True, False):
        with mode_of(model, training):
            parts[training] = split(model, cuts)
    used = [tensor_ids(stage) | tensor_ids(evaluated) for stage, evaluated in zip(*parts.values(), strict=True)]
    others = set[int]().union(*used) - used[index]
    called = {path for stages in parts.values() for path, _ in stages[index].named_modules()}
    for path, module in list(model.named_modules()):
        for members in (module._modules, module._parameters, module._buffers):
            for name, member in list(members.items()):
                ids = tensor_ids(member)
                if ids and ids <= others and f"{path}.{name}".removeprefix(".") not in called:
                    setattr(module, name, None)
    # Tracing stores constant tensors as attributes of the model. As non-persistent buffers they move with it.
    for stages in parts.values():
        for name, constant in stages[index].named_buffers(recurse=False):
            if name in vars(model):
                delattr(model, name)
                model.register_buffer(name, constant, persistent=False)
    forwards = {training: type(stages[index]).forward for training, stages in parts.items()}

    def forward(self: nn.Module, received: Tensor) -> object:
        return forwards[self.training](self, received)

    # A new class rather than an attribute: a bound method would make a cycle that keeps the model alive until a collection.
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
