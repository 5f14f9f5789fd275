"""The part of a training's state that a pipeline stage has, and how checkpoints of the whole state have it.

A checkpoint has the names that it has without stages: an optimizer's state is numbered by the whole model's parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from trainables.config import OptimConfig
from trainables.distributed.group import Group, gather_objects
from trainables.distributed.pipeline.layout import Layout
from trainables.engine.optim import parameter_groups
from trainables.methods.distillation_module import DistillationModule

_STATE = "optim.0."
"""Before the names of the optimizer's state: there is one optimizer."""


@dataclass(frozen=True)
class StatePart:
    """What this rank has of the state."""

    writers: Group
    """The stages of this rank's replica, for the threads that write checkpoints."""
    replica: int
    """Of this rank: replica 0 writes."""
    names: frozenset[str]
    """In a checkpoint: those of the model's parameters and buffers."""
    group_sizes: tuple[int, ...]
    """The number of parameters in each group of the whole optimizer."""
    indices: tuple[tuple[int, ...], ...]
    """For each group of this rank's optimizer, the number of each of its parameters in the whole one."""

    def has(self, name: str) -> bool:
        """Whether a tensor of a checkpoint belongs to this rank; methods and their parameters are the last stage's."""
        kind, _, rest = name.partition(".")
        if kind == "model":
            return name in self.names
        if kind == "method":
            return self.writers.rank == self.writers.world_size - 1
        return kind != "optim" or int(rest.split(".")[1]) in chain(*self.indices)

    def to_whole(self, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """From what this rank would save by itself what it saves."""
        return _renumbered(tensors, optimizer, dict(enumerate(chain(*self.indices))), self.group_sizes)

    def to_local(self, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """From the tensors of a checkpoint that this rank `has` what it loads into its part."""
        local = {index: number for number, index in enumerate(chain(*self.indices))}
        return _renumbered(tensors, optimizer, local, [len(group) for group in self.indices])


def _renumbered(
    tensors: Mapping[str, Tensor], optimizer: Mapping[str, Any], numbers: Mapping[int, int], group_sizes: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """With another number for each parameter of the optimizer, whose groups have so many."""

    def name_of(name: str) -> str:
        if not name.startswith(_STATE):
            return name
        index, slot = name.removeprefix(_STATE).split(".", 1)
        return f"{_STATE}{numbers[int(index)]}.{slot}"

    plain = {str(numbers[int(index)]): values for index, values in optimizer["plain"].items() if int(index) in numbers}
    bounds = pairwise(accumulate(group_sizes, initial=0))
    groups = [{**group, "params": list(range(*each))} for group, each in zip(optimizer["param_groups"], bounds, strict=True)]
    found = {name_of(name): tensor for name, tensor in tensors.items()}
    return found, {**optimizer, "param_groups": groups, "plain": plain}


def blank_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those of `model` by their names in a checkpoint, without memory; a tied one has several names."""
    blanks = {p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    return {f"model.{name}": blanks[p] for name, p in model.named_parameters(remove_duplicate=False)}


def state_part(
    module: DistillationModule,
    optimizer: torch.optim.Optimizer,
    *,
    student_parameters: Mapping[str, nn.Parameter],
    optim: OptimConfig,
    layout: Layout,
) -> StatePart:
    """The part of a rank that trains `module` with `optimizer`. `student_parameters`: those of the whole student, blank.

    Every rank calls it.
    """
    own = {parameter: f"model.{name}" for name, parameter in module.student.named_parameters()}
    own |= {parameter: f"method.{name}" for name, parameter in module.methods.named_parameters()}
    of_methods = [(own[p], torch.empty_like(p, device="meta"), p.requires_grad) for p in module.methods.parameters()]
    whole = {**student_parameters}
    for name, blank, requires_grad in gather_objects(of_methods, layout.hosts)[-1]:
        whole[name] = nn.Parameter(blank, requires_grad=requires_grad)
    groups = [group["params"] for group in parameter_groups(dict.fromkeys(whole.values()), optim)]
    number = {parameter: index for index, parameter in enumerate(p for group in groups for p in group)}
    return StatePart(
        writers=layout.writers,
        replica=layout.replicas.rank,
        names=frozenset(f"model.{name}" for name in module.student.state_dict()),
        group_sizes=tuple(map(len, groups)),
        indices=tuple(tuple(number[whole[own[p]]] for p in group["params"]) for group in optimizer.param_groups),
    )
