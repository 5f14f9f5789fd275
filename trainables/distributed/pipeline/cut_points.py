"""Where a model can be cut into pipeline stages: where its graph narrows to one tensor.

The graph is that of `torch.fx`. A residual or dense connection is a second tensor, so that no cut goes through it. A module
whose own forward cannot be traced (it branches on values) is a node of the graph: it is never cut inside.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from trainables.distributed.pipeline.graph import attribute_of, cannot_be_cut, mode_of, module_paths, trace

MAX_CPU_WORK = 10**10
"""Parameters times pixels up to which blank images pass through a model on the CPU."""


@dataclass(frozen=True)
class CutPoint:
    """A place where a model can be cut: the next stage begins with a module."""

    module: str
    """The dotted path of the outermost module that begins here."""
    aliases: tuple[str, ...]
    """Paths of the modules inside it that begin here too."""


def cut_points(model: nn.Module, image_size: int, uncut: Collection[str] = ()) -> list[CutPoint]:
    """Where `model` can be cut, in the order of its forward; the same in training and in eval mode.

    Each side of a cut has parameters, and no parameter is on both. All modules of `uncut` (paths) are in the last stage.

    Raises ModelError: the model's forward cannot be traced.
    """
    found: list[dict[str, CutPoint]] = []
    for training in (True, False):
        with mode_of(model, training):
            found.append({point.module: point for point in _cut_points(model, image_size, uncut)})
    return [point for name, point in found[0].items() if name in found[1]]


def _cut_points(model: nn.Module, image_size: int, uncut: Collection[str]) -> Iterator[CutPoint]:
    graph = trace(model)
    nodes = list(graph.nodes)
    values = _Values(model, graph, image_size).of_samples
    position = {node: index for index, node in enumerate(nodes)}
    last_use = {node: max((position[user] for user in node.users), default=-1) for node in nodes}
    used = [_tensors(node, model) for node in nodes]
    used_after = list(itertools.accumulate(reversed(used), set.union, initial=set[int]()))[-2::-1]
    begun, used_before = set[str](), set[int]()
    live: set[fx.Node] = set()
    crossed: fx.Node | None = None
    for index, (node, following) in enumerate(itertools.pairwise(nodes)):
        begun.update(module_paths(node))
        if not begun.isdisjoint(uncut):
            return
        if node.op != "get_attr":  # a stage reads its own parameters
            live.add(node)
        live = {each for each in live if last_use[each] > index}
        used_before |= used[index]
        paths = tuple(path for path in module_paths(following) if path not in begun)
        parts_have_parameters = used_before and used_after[index] and used_before.isdisjoint(used_after[index])
        if len(live) != 1 or not paths or not parts_have_parameters:
            continue
        crossing = next(iter(live))
        # Between two places that the same tensor crosses only its shape is looked at: they are one.
        if crossing not in values or crossing is crossed:
            continue
        if not any(_in_place(user, model) for user in crossing.users if position[user] > index):
            crossed = crossing
            yield CutPoint(paths[0], paths[1:])


def _tensors(node: fx.Node, model: nn.Module) -> set[int]:
    """The ids of the parameters and buffers that a node computes with."""
    inputs = [attribute_of(model, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        inputs += [*module.parameters(), *module.buffers()]
    return {id(each) for each in inputs if isinstance(each, Tensor)}


def _in_place(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node changes its input: autograd refuses that of a tensor that was received."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.kwargs.get("inplace"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("iadd", "imul", "isub", "itruediv")


class _Values(fx.Interpreter):
    """Passes two blank images through a copy of the model: see `_dry_copy`."""

    def __init__(self, model: nn.Module, graph: fx.Graph, image_size: int) -> None:
        copied = _dry_copy(model, image_size)
        super().__init__(fx.GraphModule(copied, graph))
        self.of_samples = set[fx.Node]()
        """Whose values are tensors of samples that gradients can flow through."""
        parameter = next(copied.parameters())
        images_BCHW = torch.zeros(2, 3, image_size, image_size, dtype=parameter.dtype, device=parameter.device)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                self.run(images_BCHW)
        except Exception as error:  # of a graph that is not what the model does
            raise cannot_be_cut(model, error) from error

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.ndim > 1 and len(value) == 2 and value.is_floating_point():
            self.of_samples.add(n)
        return value


def _dry_copy(model: nn.Module, image_size: int) -> nn.Module:
    """A copy to run on blank images; where that is much work for a CPU, on the meta device, which only computes shapes."""
    tensors = [*model.parameters(), *model.buffers()]
    work = image_size**2 * sum(tensor.numel() for tensor in tensors)
    # What a copy refers to by id is there already: the weights are not copied.
    if work <= MAX_CPU_WORK or tensors[0].device.type != "cpu":
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    # Tensors that a forward makes are plain attributes of the model once it is traced.
    plain = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    there = {id(tensor): tensor.detach().to("meta") for tensor in (*tensors, *plain)}
    for tensor in model.parameters():
        there[id(tensor)] = nn.Parameter(there[id(tensor)], requires_grad=False)
    return copy.deepcopy(model, there)
