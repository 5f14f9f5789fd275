"""The interface through which a job reports its numbers.

Names show the kind of a report: `train/…` in a `step`, `val/…` and `epoch/…` in an `epoch`, plain names in `start` and
`summary`. So no name occurs twice at one step, even in a store that indexes numbers only by name and step.
"""

from typing import Protocol


class Report(Protocol):
    """Records numbers. `kind`: `start`, `step` (a log line), `epoch` (called by every rank), `summary`."""

    def __call__(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None: ...
