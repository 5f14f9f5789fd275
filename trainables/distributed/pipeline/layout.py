"""Arrange the ranks of a job as replicas of a model, each made of pipeline stages."""

import socket
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trainables.distributed.gather import gloo_group
from trainables.distributed.group import Group, gather_objects


@dataclass(frozen=True)
class Layout:
    """This rank's replica and pipeline stage."""

    job: Group
    """All ranks of the job."""
    replicas: Group
    """The ranks with the same pipeline stage: `replicas.rank` is the index of this rank's replica."""
    pipeline: Group
    """The ranks of this replica: `pipeline.rank` is the index of this rank's stage."""
    cpu_group: Group
    """The same ranks, with a process group for CPU tensors, which sends batches."""
    writers: Group
    """Like `cpu_group`, for the threads that write checkpoints."""

    @property
    def has_stages(self) -> bool:
        """Whether a replica spans several ranks."""
        return self.pipeline.world_size > 1

    @property
    def is_first(self) -> bool:
        """Whether this rank's stage gets the images."""
        return self.pipeline.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage computes the logits."""
        return self.pipeline.rank == self.pipeline.world_size - 1


_built = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Group, int], Layout]]()
"""Layouts by the process group of all ranks: they become invalid together."""


def build_layout(group: Group, num_stages: int) -> Layout:
    """Make rank r stage r mod `num_stages` of replica r div `num_stages`. Every rank must call this.

    Successive jobs of a process share process groups, since torch keeps each group until all are destroyed.
    """
    if num_stages == 1:
        alone = Group(local_rank=group.local_rank, device=group.device)
        return Layout(job=group, replicas=group, pipeline=alone, cpu_group=alone, writers=alone)
    assert dist.group.WORLD is not None
    built = _built.setdefault(dist.group.WORLD, {})
    if (group, num_stages) not in built:
        built[group, num_stages] = _build_pipeline_stages(group, num_stages)
    return built[group, num_stages]


def _build_pipeline_stages(group: Group, num_stages: int) -> Layout:
    shape = (group.world_size // num_stages, num_stages)
    mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=("replica", "stage"))

    def part(name: str) -> Group:
        process_group = mesh.get_group(name)
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        found = Group(rank, world_size, 0, group.device, process_group)
        nodes = gather_objects(socket.gethostname(), found)
        return replace(found, local_rank=nodes[:rank].count(nodes[rank]))

    pipeline = part("stage")
    cpu_group, writers = (replace(pipeline, device=torch.device("cpu"), process_group=gloo_group(pipeline)) for _ in range(2))
    return Layout(group, part("replica"), pipeline, cpu_group, writers)
