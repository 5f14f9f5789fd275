"""Teacher dropping: Sariyildiz, Weinzaepfel, Lucas, Larlus and Kalantidis 2024 (ECCV), "UNIC: Universal Classification Models via
Multi-teacher Distillation", section 3.3.

An image learns from the teacher with the largest loss, and from each other one with probability 1 − p. Losses are divided by the
sum of what is left, here Σ over the images of the global batch and their teachers of the teacher's share: p = 0 changes nothing.
A teacher's loss is that of all methods with it, by their weights but not by its share.

Shapes: B samples of this rank, N of the global batch, E teachers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainables.device.random_numbers import Draws
from trainables.distributed.gather import Gather


@dataclass(frozen=True)
class TeacherDropping:
    """Which images learn from which teachers, a function of (seed, epoch, sample) and the losses."""

    probability: float
    seed: int
    teachers: Mapping[str, int]
    """Method key → the number of its teacher."""
    shares: Sequence[float]

    @torch.no_grad()
    def weights(
        self,
        terms: Mapping[str, Mapping[str, Tensor]],
        weights: Mapping[str, float],
        epoch: int,
        views_B: Tensor,
        gather: Gather,
    ) -> dict[str, Tensor]:
        """Method key → the weight of each image's loss (B,), for `terms` (B,) and their `weights`. Every rank calls it."""
        some = next(iter(terms[next(iter(self.teachers))].values()))
        losses_EB = [torch.zeros_like(some) for _ in self.shares]
        for key, number in self.teachers.items():
            losses_EB[number] += weights[key] / self.shares[number] * torch.stack(list(terms[key].values())).sum(0)
        draws_BE = Draws(self.seed, epoch, views_B).uniforms("teacher_dropping", len(self.shares))
        is_left_BE = (draws_BE >= self.probability).scatter(1, torch.stack(losses_EB, 1).argmax(1, keepdim=True), True)
        left_NE = gather(is_left_BE * draws_BE.new_tensor(self.shares))
        scale_BE = is_left_BE * (len(left_NE) / left_NE.sum())
        return {key: weights[key] * scale_BE[:, number].to(some.dtype) for key, number in self.teachers.items()}
