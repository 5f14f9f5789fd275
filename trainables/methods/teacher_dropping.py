"""Teacher dropping: Sariyildiz, Weinzaepfel, Lucas, Larlus and Kalantidis 2024 (ECCV), "UNIC: Universal Classification Models via
Multi-teacher Distillation", section 3.3.

An image learns from the teacher with the largest loss, and from each other one with probability 1 − p. Losses are divided by the
total share of the remaining (image, teacher) pairs of the global batch, so that p = 0 changes nothing. A teacher's loss sums all
methods that use it, with their weights but without its share.

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
    """Decides which images learn from which teachers, as a function of (seed, epoch, sample) and the losses."""

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
        """Return for each method key the weights (B,) of the images' losses, given `terms` (B,) and `weights`. Collective."""
        some = next(iter(terms[next(iter(self.teachers))].values()))
        losses_EB = [torch.zeros_like(some) for _ in self.shares]
        for key, number in self.teachers.items():
            losses_EB[number] += weights[key] / self.shares[number] * torch.stack(list(terms[key].values())).sum(0)
        draws_BE = Draws(self.seed, epoch, views_B).uniforms("teacher_dropping", len(self.shares))
        is_left_BE = (draws_BE >= self.probability).scatter(1, torch.stack(losses_EB, 1).argmax(1, keepdim=True), True)
        left_NE = gather(is_left_BE * draws_BE.new_tensor(self.shares))
        scale_BE = is_left_BE * (len(left_NE) / left_NE.sum())
        return {key: weights[key] * scale_BE[:, number].to(some.dtype) for key, number in self.teachers.items()}
