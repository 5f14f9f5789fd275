"""The stages of a model: each a module of its own graph, over the model's modules and under their names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx, nn

from trainables.distributed.pipeline.graph import mode_of, module_paths, trace
from trainables.errors import ModelError


def split(model: nn.Module, cuts: Sequence[str]) -> list[StageModule]:
    """The stages of a model, each beginning with the module that a cut names. They share the model's modules and parameters.

    The names of parameters and buffers are those of the whole model. Modules that hold no cut are called as they are.

    `cuts`: of `cut_points`, in their order. Raises ModelError: the forward cannot be traced, or a buffer would be lost.
    """
    expand = {cut.rsplit(".", count)[0] for cut in cuts for count in range(1, cut.count(".") + 1)}
    graphs = {}
    for training in (True, False):
        with mode_of(model, training):
            graphs[training] = _split_graph(trace(model, expand), cuts)
    stages = [StageModule(model, graphs[True][stage], graphs[False][stage]) for stage in range(len(cuts) + 1)]
    if differing := set(model.state_dict()) ^ {name for stage in stages for name in stage.state_dict()}:
        name = type(model).__name__
        raise ModelError(f"{name} cannot be cut before {', '.join(cuts)}: no stage has {', '.join(sorted(differing))}")
    return stages


def _split_graph(graph: fx.Graph, cuts: Sequence[str]) -> list[fx.Graph]:
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    starts = [next(index for index, node in enumerate(nodes) if cut in module_paths(node)) for cut in cuts]
    return [_part(nodes, first, end) for first, end in itertools.pairwise([0, *starts, len(nodes)])]


def _part(nodes: Sequence[fx.Node], first: int, end: int) -> fx.Graph:
    """The nodes [first, end) as a graph of their own: one tensor in, one out."""
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    before, inside, later = set(nodes[:first]), nodes[first:end], set(nodes[end:])
    if first:  # before all nodes: a graph's inputs come first
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


class StageModule(fx.GraphModule):
    """A part of a model: the tensor of the stage before (the images, for the first) to that of the next (the logits).

    Has a graph for each mode, as some models compute more in training.
    """

    def __init__(self, model: nn.Module, training: fx.Graph, evaluation: fx.Graph) -> None:
        super().__init__(model, training, type(model).__name__)
        self._graphs = {True: self.graph, False: self.graph}
        if training.python_code("self").src != evaluation.python_code("self").src:
            other, own = fx.GraphModule(model, evaluation), dict(self.named_modules())
            for path, module in other.named_modules():
                if path not in own:
                    self.add_submodule(path, module)
            for name, constant in other.named_buffers(recurse=False):
                self.register_buffer(name, constant)
            self._graphs[False] = other.graph
        # Tensors that a forward makes, constants of its graph, are no state.
        self._non_persistent_buffers_set.update(self._buffers.keys() - model.state_dict().keys())
        self.train(model.training)

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode of all modules, and run its graph from now on."""
        if self._graphs[mode] is not self.graph:
            self.graph = self._graphs[mode]
        super().train(mode)
        return self
