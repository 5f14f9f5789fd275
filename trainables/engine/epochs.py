"""The epochs of a stage, and the mapping from steps to epochs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Epochs:
    """The epochs of a stage."""

    num: int
    steps_per_epoch: int
    order_offset: int = 0
    """Epochs of a preceding init stage. Data order and augmentation continue from there."""
    step_offset: int = 0
    """Steps so far minus the steps that those epochs would have with the current data: 0 unless the data has changed."""

    def passed(self, step: int) -> float:
        """Return the (fractional) number of epochs before a step of the stage."""
        return (step - self.step_offset) / self.steps_per_epoch
