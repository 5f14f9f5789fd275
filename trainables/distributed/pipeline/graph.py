"""Where a model can be cut into pipeline stages: where its graph narrows to one tensor.

The graph is that of `torch.fx`. A residual or dense connection is a second tensor, so that no cut goes through it. A module
whose own forward cannot be traced (it branches on values) is a node of the graph: it is never cut inside.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from trainables.errors import ModelError

MAX_CPU_WORK = 10**10
"""Parameters times pixels up to which blank images pass through a model on the CPU."""


@dataclass(frozen=True)
class CutPoint:
    """A place where a model can be cut: the next stage begins with a module."""

    module: str
    """The dotted path of the outermost module that begins here."""
    aliases: tuple[str, ...]
    """Paths of the modules inside it that begin here too."""
    shape: tuple[int, ...]
    """Of the one tensor that crosses the cut, without the batch dimension."""
    dtype: torch.dtype


class _Tracer(fx.Tracer):
    """Traces into all modules, or into those of `expand`, but for those of `opaque`."""

    def __init__(self, opaque: Collection[str], expand: Collection[str] | None) -> None:
        super().__init__()
        self._opaque, self._expand = opaque, expand
        self.failed_in: str | None = None
        """The innermost module whose forward raised."""

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        if path in self._opaque or (self._expand is not None and path not in self._expand):
            return True
        return super().is_leaf_module(module, path)

    def call_module(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(module, forward, args, kwargs)
        except Exception:
            if self.failed_in is None:
                self.failed_in = self.path_of_module(module)
            raise


def trace(model: nn.Module, expand: Collection[str] | None = None) -> fx.Graph:
    """The graph of the model's forward in its present mode.

    `expand`: the modules that are traced into; by default all but torch's own layers and those that cannot be traced.

    Raises:
        ModelError: the model's own forward cannot be traced.
    """
    opaque: set[str] = set()
    while True:
        tracer = _Tracer(opaque, expand)
        try:
            return _images_only(tracer.trace(model, _defaults(model)))
        except Exception as error:  # whatever a model's forward raises when it is called with symbols
            if tracer.failed_in is None or tracer.failed_in in opaque:
                raise _cannot_be_cut(model, error) from error
            opaque.add(tracer.failed_in)


def _cannot_be_cut(model: nn.Module, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(f"{type(model).__name__} cannot be cut into pipeline stages: {reason}")


def _defaults(model: nn.Module) -> dict[str, Any]:
    """What the forward takes besides the images, such as an attention mask: its defaults, or branches on it would go wrong."""
    parameters = list(inspect.signature(model.forward).parameters.values())[1:]
    return {
        each.name: each.default for each in parameters if each.default is None or isinstance(each.default, bool | int | float)
    }


def _images_only(graph: fx.Graph) -> fx.Graph:
    """Drop the inputs that stand for defaults, and torch's checks that nothing else is given."""
    for node in list(graph.find_nodes(op="placeholder"))[1:]:
        for check in list(node.users):
            for assertion in list(check.users):
                graph.erase_node(assertion)
            graph.erase_node(check)
        graph.erase_node(node)
    return graph


def cut_points(model: nn.Module, image_size: int, uncut: Collection[str] = ()) -> list[CutPoint]:
    """Where `model` can be cut, in the order of its forward; the same in training and in eval mode.

    Each side of a cut has parameters, and no parameter is on both. All modules of `uncut` (paths) are in the last stage.

    Raises:
        ModelError: the model's forward cannot be traced.
    """
    found: list[dict[str, CutPoint]] = []
    for training in (True, False):
        with _mode(model, training):
            found.append({point.module: point for point in _cut_points(model, image_size, uncut)})
    return [point for name, point in found[0].items() if name in found[1]]


def _cut_points(model: nn.Module, image_size: int, uncut: Collection[str]) -> Iterator[CutPoint]:
    graph = trace(model)
    nodes = list(graph.nodes)
    values = _Values(model, graph, image_size)
    position = {node: index for index, node in enumerate(nodes)}
    last_use = {node: max((position[user] for user in node.users), default=-1) for node in nodes}
    parameters = _parameter_positions(model, nodes)
    begun: set[str] = set()
    live: set[fx.Node] = set()
    crossed: fx.Node | None = None
    for index, (node, following) in enumerate(itertools.pairwise(nodes)):
        begun.update(_paths(node))
        if not begun.isdisjoint(uncut):
            return
        if node.op != "get_attr":  # a stage reads its own parameters
            live.add(node)
        live = {each for each in live if last_use[each] > index}
        paths = tuple(path for path in _paths(following) if path not in begun)
        if len(live) != 1 or not paths or not _divides(parameters, index):
            continue
        crossing = next(iter(live))
        value = values.of_sample(crossing)
        # Between two places that the same tensor crosses only its shape is looked at: they are one.
        if value is None or crossing is crossed:
            continue
        if not any(_in_place(user, model) for user in crossing.users if position[user] > index):
            crossed = crossing
            yield CutPoint(paths[0], paths[1:], *value)


def _paths(node: fx.Node) -> tuple[str, ...]:
    """The modules whose forward a node belongs to, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()] if stack else []
    own = [str(node.target)] if node.op == "call_module" else []
    return tuple(dict.fromkeys([*(path for path in paths if path), *own]))


def _parameter_positions(model: nn.Module, nodes: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """The first and the last node that uses each parameter or buffer."""
    uses: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        tensors: list[Tensor] = []
        indices = [index]
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            tensors = [*module.parameters(), *module.buffers()]
        elif node.op == "get_attr":
            value = _attribute(model, str(node.target))
            tensors = [value] if isinstance(value, Tensor) else []
            indices = [nodes.index(user) for user in node.users]
        for tensor in tensors:
            uses.setdefault(id(tensor), []).extend(indices)
    return [(min(indices), max(indices)) for indices in uses.values() if indices]


def _divides(parameters: Sequence[tuple[int, int]], index: int) -> bool:
    """Whether some parameters are used up to a node, some after it, and none on both sides."""
    before = [first <= index for first, _ in parameters]
    after = [last > index for _, last in parameters]
    return any(before) and any(after) and not any(a and b for a, b in zip(before, after, strict=True))


def _in_place(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node changes its input: autograd refuses that of a tensor that was received."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.kwargs.get("inplace"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("iadd", "imul", "isub", "itruediv")


class _Values(fx.Interpreter):
    """What is known of a graph's values after a pass of two blank images through a copy of the model: see `_dry_copy`."""

    def __init__(self, model: nn.Module, graph: fx.Graph, image_size: int) -> None:
        copied = _dry_copy(model, image_size)
        super().__init__(fx.GraphModule(copied, graph))
        self._found: dict[fx.Node, tuple[tuple[int, ...], torch.dtype]] = {}
        parameter = next(copied.parameters())
        images_BCHW = torch.zeros(2, 3, image_size, image_size, dtype=parameter.dtype, device=parameter.device)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                self.run(images_BCHW)
        except Exception as error:  # of a graph that is not what the model does
            raise _cannot_be_cut(model, error) from error

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.ndim > 1 and len(value) == 2 and value.is_floating_point():
            self._found[n] = tuple(value.shape[1:]), value.dtype
        return value

    def of_sample(self, node: fx.Node) -> tuple[tuple[int, ...], torch.dtype] | None:
        """A node's shape and type where it is a tensor of samples that gradients can flow through."""
        return self._found.get(node)


def _dry_copy(model: nn.Module, image_size: int) -> nn.Module:
    """A copy to run on blank images; where that is much work for a CPU, on the meta device, which only computes shapes."""
    tensors = [*model.parameters(), *model.buffers()]
    work = image_size**2 * sum(tensor.numel() for tensor in tensors)
    # What a copy refers to by id is there already: the weights are not copied.
    if work <= MAX_CPU_WORK or tensors[0].device.type != "cpu":
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    there = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    for tensor in model.parameters():
        there[id(tensor)] = nn.Parameter(there[id(tensor)], requires_grad=False)
    return copy.deepcopy(model, there)


def split(model: nn.Module, cuts: Sequence[str]) -> list[StageModule]:
    """The stages of a model, each beginning with the module that a cut names. They share the model's modules and parameters.

    The names of parameters and buffers are those of the whole model. Modules that hold no cut are called as they are.

    Raises:
        ModelError: the model's forward cannot be traced, or a name is no cut point.
    """
    expand = {cut.rsplit(".", count)[0] for cut in cuts for count in range(1, cut.count(".") + 1)}
    graphs = {}
    for training in (True, False):
        with _mode(model, training):
            graphs[training] = _split_graph(trace(model, expand), cuts)
    return [StageModule(model, graphs[True][stage], graphs[False][stage]) for stage in range(len(cuts) + 1)]


def _split_graph(graph: fx.Graph, cuts: Sequence[str]) -> list[fx.Graph]:
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    starts = [0]
    for cut in cuts:
        index = next((index for index, node in enumerate(nodes) if cut in _paths(node)), None)
        if index is None or index <= starts[-1]:
            raise ModelError(f"{cut} is not called after what comes before it: give the cuts in the order of the forward")
        starts.append(index)
    starts.append(len(nodes))
    return [_part(graph, nodes, first, end) for first, end in itertools.pairwise(starts)]


def _part(graph: fx.Graph, nodes: Sequence[fx.Node], first: int, end: int) -> fx.Graph:
    """The nodes [first, end) as a graph of their own: one tensor in, one out."""
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inside, later = set(nodes[first:end]), set(nodes[end:])

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter, or the tensor that the previous stage sends
            copies[node] = part.node_copy(node) if node.op == "get_attr" else part.placeholder("received")
        return copies[node]

    if first:  # before all nodes: a graph's inputs come first
        previous = set(nodes[:first])
        received = {node for other in inside for node in other.all_input_nodes if node in previous}
        if len(received) != 1:
            raise ModelError(f"{nodes[first]} is no cut point: {len(received)} tensors cross it")
        copied(received.pop())
    for node in nodes[first:end]:
        copies[node] = part.node_copy(node, copied)
    if end < len(nodes):
        sent = {node for node in inside if any(user in later for user in node.users)}
        if len(sent) != 1:
            raise ModelError(f"{nodes[end]} is no cut point: {len(sent)} tensors cross it")
        part.output(copies[sent.pop()])
    return part


class StageModule(fx.GraphModule):
    """A part of a model: the tensor of the stage before (the images, for the first) to that of the next (the logits).

    Has a graph for each mode, as some models compute more in training.
    """

    def __init__(self, model: nn.Module, training: fx.Graph, evaluation: fx.Graph) -> None:
        super().__init__(model, training, type(model).__name__)
        self._graphs = {True: self.graph, False: self.graph}
        if training.python_code("self").src != evaluation.python_code("self").src:
            other = fx.GraphModule(model, evaluation)
            for path, module in other.named_modules():
                if path and not self._has(path):
                    self.add_submodule(path, module)
            self._graphs[False] = other.graph
        self.train(model.training)

    def _has(self, path: str) -> bool:
        try:
            self.get_submodule(path)
        except AttributeError:
            return False
        return True

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode of all modules, and run its graph from now on."""
        if self._graphs[mode] is not self.graph:
            self.graph = self._graphs[mode]
        super().train(mode)
        return self


def _attribute(model: nn.Module, path: str) -> Any:
    parent, _, name = path.rpartition(".")
    return getattr(model.get_submodule(parent), name)


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
