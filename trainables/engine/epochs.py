"""The epochs of a stage, and how far its steps are in them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Epochs:
    """All epochs of a stage."""

    num: int
    steps_per_epoch: int
    order_offset: int = 0
    """Epochs of the init stage before this one: the order of the data and the augmentations go on from there."""
    step_offset: int = 0
    """By how much the steps so far are more than those that their epochs would have now: 0 unless the data has changed."""

    def passed(self, step: int) -> float:
        """Epochs that have passed before a step of the stage, fractions included."""
        return (step - self.step_offset) / self.steps_per_epoch
