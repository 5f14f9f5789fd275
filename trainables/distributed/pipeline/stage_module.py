"""Split a model into stages: parts of its graph that share its modules and their names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, fx, nn

from trainables.distributed.pipeline.graph import mode_of, module_paths, tensor_ids, trace


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
