"""How a job reports its numbers.

The names of a report's numbers show its kind: `train/…` in a `step`, `val/…` and `epoch/…` in an `epoch`, plain names in
`start` and `summary`. So no name comes twice at one step, in a run's log or in a store that has numbers by name and step alone.
"""

from typing import Protocol


class Report(Protocol):
    """Records numbers. `kind`: `start`, `step` (a log line), `epoch` (every rank calls it), `summary`."""

    def __call__(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None: ...
