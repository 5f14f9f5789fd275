"""Find the points where a model can be cut into pipeline stages: where its `torch.fx` graph narrows to one tensor.

A residual or dense connection is a second tensor, so no cut crosses it. A module whose forward cannot be traced (it branches on
values) is one node of the graph and is never cut inside.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, fx, nn

from trainables.distributed.pipeline.graph import cannot_be_cut, mode_of, module_paths, tensor_ids, trace
from trainables.models.forward import dry_forward


def cut_points(model: nn.Module, image_size: int, uncut: Collection[str] = ()) -> list[str]:
    """Return the cut points of `model` in forward order that are valid in both training and eval mode.

    A cut is named by the outermost module that begins there. Each side has parameters, and none is on both sides. All modules
    of `uncut` (paths) are in the last stage.

    Raises ModelError: the model's forward cannot be traced.
    """
    found: list[list[str]] = []
    for training in (True, False):
        with mode_of(model, training):
            found.append(list(_cut_points(model, image_size, uncut)))
    return [name for name in found[0] if name in found[1]]


def _cut_points(model: nn.Module, image_size: int, uncut: Collection[str]) -> Iterator[str]:
    graph = trace(model)
    can_be_sent = _Values(fx.GraphModule(model, graph, type(model).__name__)).can_be_sent(image_size)
    nodes = list(graph.nodes)
    last_use = {each: index for index, node in enumerate(nodes) for each in node.all_input_nodes}
    used = [_tensors(node, model) for node in nodes]
    used_until: list[set[int]] = list(itertools.accumulate(used, operator.or_))
    used_from: list[set[int]] = list(itertools.accumulate(reversed(used), operator.or_))[::-1]
    begun = set[str]()
    live = set[fx.Node]()
    crossed: fx.Node | None = None
    for index, (node, following) in enumerate(itertools.pairwise(nodes)):
        begun.update(module_paths(node))
        if not begun.isdisjoint(uncut):
            return
        if node.op != "get_attr":  # a stage reads its own parameters
            live.add(node)
        live = {each for each in live if last_use.get(each, -1) > index}
        before, after = used_until[index], used_from[index + 1]
        begins = next((path for path in module_paths(following) if path not in begun), None)
        if begins is None or len(live) != 1 or not before or not after or before & after:
            continue
        (crossing,) = live
        # Between two points crossed by the same tensor only its shape is read, so they are one cut.
        if crossing in can_be_sent and crossing is not crossed:
            crossed = crossing
            yield begins


def _tensors(node: fx.Node, model: nn.Module) -> set[int]:
    """Return the ids of the parameters and buffers that a node uses."""
    sources = [each for each in node.all_input_nodes if each.op == "get_attr"] + [node] * (node.op == "call_module")
    return set().union(*(tensor_ids(operator.attrgetter(str(each.target))(model)) for each in sources))


class _Values(fx.Interpreter):
    """Runs a traced model on two samples, and records the tensors that gradients can flow through."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self._found = list[tuple[fx.Node, Tensor, int]]()
        traced.forward = self.run

    def can_be_sent(self, image_size: int) -> set[fx.Node]:
        """Return the nodes whose tensors are not changed in place, which autograd forbids for a received tensor."""
        assert isinstance(self.module, fx.GraphModule)
        try:
            dry_forward(self.module, image_size, training=self.module.training)
        except Exception as error:  # the graph does not compute what the model does
            raise cannot_be_cut(self.module, error) from error
        return {node for node, value, version in self._found if value._version == version}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.ndim > 1 and len(value) == 2 and value.is_floating_point():
            self._found.append((n, value, value._version))
        return value
