"""The epochs of a stage, and the three ways in which each is counted."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """One epoch of a stage."""

    index: int
    """In the stage, from 0, the epochs of an init stage included: the order of the data is drawn from it."""
    training: int
    """In the training, from 0; below 0 in an init stage. Schedules and methods count by it."""
    augmentation: int
    """The epoch whose augmentations the images have: with cached logits there are fewer than epochs."""


@dataclass(frozen=True)
class Epochs:
    """All epochs of a stage: those of a method's init stage come first."""

    num_init: int
    num_training: int
    steps_per_epoch: int
    augmentation: Callable[[int], int]
    """Index of an epoch → the epoch of its augmentations."""
    step_offset: int = 0
    """By how much the steps so far are more than those that their epochs would have now: 0 unless the data has changed."""

    @property
    def total(self) -> int:
        return self.num_init + self.num_training

    def at(self, index: int) -> Epoch:
        return Epoch(index, index - self.num_init, self.augmentation(index))

    def training_step(self, step: int) -> int:
        """A step of the stage counted from the training's first one; below 0 in an init stage."""
        return step - self.step_offset - self.num_init * self.steps_per_epoch

    def training_epochs(self, step: int) -> float:
        """Epochs of training that have passed before a step of the stage, fractions included; below 0 in an init stage."""
        return (step - self.step_offset) / self.steps_per_epoch - self.num_init
