"""The part of a training's state that a pipeline stage has, and how checkpoints of the whole state are put together and read.

A checkpoint has the names that it has without stages: an optimizer's state is numbered by the whole model's parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
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

    hosts: Group
    """The ranks that have all of it together; the process group takes CPU tensors."""
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
            return self.hosts.rank == self.hosts.world_size - 1
        return kind != "optim" or int(rest.split(".")[1]) in self._local_index

    def gather(
        self, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """From what each rank of the first replica would save by itself what rank 0 saves; None on the others."""
        if self.replica:
            return None
        found = {self._renumbered(name, self._flat): tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        plain = {str(self._flat[int(index)]): values for index, values in optimizer["plain"].items()}
        described = gather_objects((plain, [(name, tensor.shape, tensor.dtype) for name, tensor in found.items()]), self.hosts)
        if self.hosts.rank:
            for tensor in found.values():
                dist.send(tensor, group_dst=0, group=self.hosts.process_group)
            return None
        for stage, (values, descriptions) in enumerate(described[1:], start=1):
            plain |= values
            for name, shape, dtype in descriptions:
                found[name] = torch.empty(shape, dtype=dtype)
                dist.recv(found[name], group_src=stage, group=self.hosts.process_group)
        return found, {**optimizer, "param_groups": _numbered(optimizer["param_groups"], self.group_sizes), "plain": plain}

    def to_local(self, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """From the tensors of a checkpoint that this rank `has` what it loads into its part."""
        local = self._local_index
        found = {self._renumbered(name, local): tensor for name, tensor in tensors.items()}
        plain = {str(local[int(index)]): values for index, values in optimizer["plain"].items() if int(index) in local}
        sizes = [len(group) for group in self.indices]
        return found, {**optimizer, "param_groups": _numbered(optimizer["param_groups"], sizes), "plain": plain}

    @property
    def _flat(self) -> Sequence[int]:
        """The number in the whole optimizer by that in this rank's."""
        return [index for group in self.indices for index in group]

    @property
    def _local_index(self) -> dict[int, int]:
        return {index: local for local, index in enumerate(self._flat)}

    def _renumbered(self, name: str, numbers: Mapping[int, int] | Sequence[int]) -> str:
        if not name.startswith(_STATE):
            return name
        index, slot = name.removeprefix(_STATE).split(".", 1)
        return f"{_STATE}{numbers[int(index)]}.{slot}"


def _numbered(groups: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """An optimizer's groups with so many parameters each, numbered through."""
    bounds = pairwise(accumulate(sizes, initial=0))
    return [{**group, "params": list(range(*bound))} for group, bound in zip(groups, bounds, strict=True)]


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
        hosts=layout.hosts,
        replica=layout.replicas.rank,
        names=frozenset(f"model.{name}" for name in module.student.state_dict()),
        group_sizes=tuple(map(len, groups)),
        indices=tuple(tuple(number[whole[own[p]]] for p in group["params"]) for group in optimizer.param_groups),
    )
