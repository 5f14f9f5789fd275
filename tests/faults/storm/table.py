"""Faults and losses, counted by kind and workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Fault(NamedTuple):
    """A fault that struck."""

    kind: str
    workload: str
    """What it struck: a trial's own, or the resumption of it."""


@dataclass(frozen=True)
class Trial:
    """A job with the faults that struck it, and what the oracle found wrong after it; nothing where nothing was lost."""

    workload: str
    faults: tuple[Fault, ...]
    losses: tuple[str, ...] = ()


@dataclass
class Table:
    """Counts of all trials so far. A loss counts for each fault of its trial."""

    trials: list[Trial] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return sum(len(trial.faults) for trial in self.trials)

    @property
    def num_losses(self) -> int:
        return sum(bool(trial.losses) for trial in self.trials)

    def markdown(self) -> Iterator[str]:
        """Lines of a table: kind of fault × workload, and the trials in which something was lost."""
        faults = Counter(fault for trial in self.trials for fault in trial.faults)
        lost = Counter(fault for trial in self.trials if trial.losses for fault in trial.faults)
        workloads = list(dict.fromkeys(fault.workload for fault in faults))
        yield from _row(["fault", *workloads, "all", "losses"])
        yield from _row(["---", *["---:"] * (len(workloads) + 2)])
        for kind in sorted({fault.kind for fault in faults}):
            counts = [faults[Fault(kind, workload)] for workload in workloads]
            losses = sum(lost[Fault(kind, workload)] for workload in workloads)
            yield from _row([kind, *(str(count or "") for count in counts), str(sum(counts)), str(losses)])
        of_each = [sum(fault.workload == workload for trial in self.trials for fault in trial.faults) for workload in workloads]
        yield from _row(["all", *map(str, of_each), str(sum(of_each)), str(self.num_losses)])


def _row(cells: Iterable[str]) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
