"""The stages of a model: the parts of its graph, over its own modules and under their names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, fx, nn

from trainables.distributed.pipeline.graph import mode_of, module_paths, tensor_ids, trace


def split(model: nn.Module, cuts: Sequence[str]) -> list[fx.GraphModule]:
    """What the stages of a model run in its present mode, each beginning with the module that a cut names.

    From the tensor of the stage before (the images, for the first) to that of the next (the model's output). They share the
    model's modules and parameters, under the same names. Modules that hold no cut are called as they are.

    `cuts`: of `cut_points`, in their order. Raises ModelError: the forward cannot be traced.
    """
    expand = {cut.rsplit(".", count)[0] for cut in cuts for count in range(1, cut.count(".") + 1)}
    nodes = [node for node in trace(model, expand).nodes if node.op != "get_attr"]
    starts = [next(index for index, node in enumerate(nodes) if cut in module_paths(node)) for cut in cuts]
    bounds = itertools.pairwise([0, *starts, len(nodes)])
    return [fx.GraphModule(model, _part(nodes, *each), type(model).__name__) for each in bounds]


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


def become_stage(model: nn.Module, cuts: Sequence[str], index: int) -> None:
    """Turn a model into one of its stages, see `split`: it runs that alone, and has no parameters and buffers of the others.

    Those that no stage computes with stay. It has a graph for each mode, as some models compute more in training.
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
    # Tensors that a forward makes are attributes of the model once it is traced. They are no state, and move with it.
    for stages in parts.values():
        for name, constant in stages[index].named_buffers(recurse=False):
            if name in vars(model):
                delattr(model, name)
                model.register_buffer(name, constant, persistent=False)
    forwards = {training: type(stages[index]).forward for training, stages in parts.items()}

    def forward(self: nn.Module, received: Tensor) -> object:
        return forwards[self.training](self, received)

    # A class of its own: an attribute of the model that refers to the model would outlive the job until a collection.
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
