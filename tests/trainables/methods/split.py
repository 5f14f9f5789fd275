"""A method on a global batch that lies on one rank or on several: what it says, and the gradients that a step would have."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.trainables.methods.calls import make, samples
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.methods.contract import Method, ModelOutputs


@dataclass(frozen=True)
class Case:
    """A method with its options, the shapes of its features on either side, and how many steps are taken of it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    student_shapes: tuple[tuple[int, ...], ...] = ()
    teacher_shapes: tuple[tuple[int, ...], ...] = ()
    steps: int = 1

    def make(self, **more: Any) -> Method:
        return make(self.name, student_shapes=self.student_shapes, teacher_shapes=self.teacher_shapes, **self.options, **more)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


def draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def answers(case: Case, rows: int, seed: int = 0, num_classes: int = 5) -> tuple[ModelOutputs, ModelOutputs]:
    """Random logits and features of student and teacher; the student's are leaves that want a gradient."""
    seeds = iter(range(100 * seed, 100 * seed + 100))
    shapes = [(num_classes,), *case.student_shapes], [(num_classes,), *case.teacher_shapes]
    student = [draw(rows, *shape, seed=next(seeds), scale=2.0).requires_grad_() for shape in shapes[0]]
    teacher = [draw(rows, *shape, seed=next(seeds), scale=2.0) for shape in shapes[1]]
    return ModelOutputs(student[0], tuple(student[1:])), ModelOutputs(teacher[0], tuple(teacher[1:]))


def leaves(outputs: ModelOutputs) -> list[Tensor]:
    return [outputs.logits_BK, *outputs.features]


def steps(group: Group, case: Case, split: tuple[int, ...]) -> list[Tensor]:
    """Means of the terms over the global batch, own features' and parameters' gradients, and memory after `case.steps` steps.

    The gradients are those that DDP leaves: averaged over ranks, of a loss that weighs each sample by ranks / global batch.
    """
    total, own = sum(split), slice(sum(split[: group.rank]), sum(split[: group.rank + 1]))
    method, found = case.make(group=group), []
    for step in range(case.steps):
        student, teacher = answers(case, total, seed=step)
        own_part = [
            ModelOutputs(
                outputs.logits_BK[own].detach().clone(), tuple(feature[own].detach().clone() for feature in outputs.features)
            )
            for outputs in (student, teacher)
        ]
        for leaf in leaves(own_part[0]):
            leaf.requires_grad_()
        labels, indices = torch.arange(total) % 5, (torch.arange(total) * 5 + torch.arange(total) % 5) % 40
        images = draw(total, 3, 8, 8, seed=step)[own]
        batch = samples(labels[own], indices_B=indices[own], images_BCHW=images, epoch=float(step), group=group)
        terms = method(*own_part, batch)
        assert tuple(terms) == method.terms
        loss = torch.stack([t if t.ndim == 0 else t.sum() * group.world_size / total for t in terms.values()]).sum()
        loss.backward()
        found += [t.detach() if t.ndim == 0 else _summed(t.detach().sum(), group) / total for t in terms.values()]
        found += [_all(leaf.grad, batch.gather) / group.world_size for leaf in leaves(own_part[0]) if leaf.grad is not None]
    found += [_summed(p.grad.clone(), group) / group.world_size for p in method.parameters() if p.grad is not None]
    return found + [buffer.clone() for buffer in method.buffers()]


def assert_ranks_equal_one(ranks: RankPool, case: Case, split: tuple[int, ...]) -> None:
    """To 1e-9 in float64, and all ranks say the same."""
    (one,) = ranks.run(1, steps, case, (sum(split),))
    several = ranks.run(len(split), steps, case, split)
    assert any(tensor.is_floating_point() and tensor.count_nonzero() for tensor in one)
    for rank in several:
        for expected, found in zip(one, rank, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def _summed(tensor: Tensor, group: Group) -> Tensor:
    if group.world_size > 1:
        torch.distributed.all_reduce(tensor)
    return tensor


def _all(gradient: Tensor, all_gather: Any) -> Tensor:
    gathered: Tensor = all_gather(gradient)
    return gathered
