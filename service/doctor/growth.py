"""Steps that grow in the course of a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import methodcaller
from statistics import fmean, median
from typing import NamedTuple

from service.doctor.clocks import clocks_lost, fallen, latest
from service.doctor.evidence import LEAST_PCT, Evidence
from service.doctor.recorded import EpochUse, RankTimes
from service.doctor.step_model import Cause, Effect
from trainables.metrics.phases import ALL_PHASES, RECEIVE

SURE = 3.0
"""Steps that grow have to grow by so many times what epochs differ by from one to the next."""
FEWEST_EPOCHS = 3


class Growth(NamedTuple):
    """How a part of the steps grew, from the fastest third of the epochs to the last third."""

    fast_ms: float
    late_ms: float
    more_ms: float
    """What it takes longer in the last third than in the fastest, had the GPUs had the same clocks."""
    phase: str
    """The one that grew most, "" where it is not recorded."""


def growth(epochs: Sequence[EpochUse], of: Callable[[EpochUse], float], lost: Sequence[float] | None = None) -> Growth | None:
    """How `of` the epochs grew, of which clocks have cost the parts `lost`. None: by no more than epochs differ, or not 5%."""
    if len(epochs) < FEWEST_EPOCHS:
        return None
    lost = lost or [0.0] * len(epochs)
    fair_ms = [of(epoch) * (1 - part) for epoch, part in zip(epochs, lost, strict=True)]
    late = latest(epochs)
    fast = sorted(zip(fair_ms, epochs, strict=True), key=lambda pair: pair[0])[: len(late)]
    fast_ms, late_ms = median(ms for ms, _ in fast), median(latest(fair_ms))
    differences = [abs(after - before) for before, after in pairwise(fair_ms)]
    if late_ms - fast_ms < max(SURE * median(differences), LEAST_PCT / 100 * median(epoch.step_ms for epoch in late)):
        return None

    def longer_ms(phase: str) -> float:
        return fmean(epoch.phase_ms(phase) for epoch in late) - fmean(epoch.phase_ms(phase) for _, epoch in fast)

    return Growth(
        fast_ms=median(of(epoch) for _, epoch in fast),
        late_ms=median(map(of, late)),
        more_ms=max(0.0, fmean(of(epoch) - fast_ms / (1 - part) for epoch, part in zip(late, latest(lost), strict=True))),
        phase=max(late[-1].phases_ms, key=longer_ms, default=""),
    )


def computing_ms(epoch: EpochUse) -> float:
    """A step but for its waits for images: what grows behind a loader, or a copy to the GPU, that is slower still."""
    return epoch.step_ms - data_ms(epoch) - (epoch.phase_ms("h2d") if epoch.gpus else 0.0)


def data_ms(epoch: EpochUse) -> float:
    """What a step waits for its images: on later pipeline stages until the first one has them."""
    return epoch.phase_ms("data") + epoch.phase_ms(RECEIVE)


def as_it_is_now(e: Evidence) -> Evidence:
    """A run whose steps have grown, by more than epochs differ: with the phases of the last third of its epochs.

    Those are known of one rank; the others' are taken to have grown alike.
    """
    if growth(e.epochs, computing_ms) is None and growth(e.epochs, data_ms) is None:
        return e

    def times(of: Callable[[EpochUse], float]) -> float:
        whole = fmean(map(of, e.epochs))
        return fmean(map(of, latest(e.epochs))) / whole if whole else 1.0

    by_phase = {phase: times(methodcaller("phase_ms", phase)) for phase in ALL_PHASES}
    step = times(lambda epoch: epoch.step_ms)

    def grown(rank: RankTimes) -> RankTimes:
        changed = {f"{phase}_ms": getattr(rank, f"{phase}_ms") * more for phase, more in by_phase.items()}
        if rank.allreduce_wait_ms is not None and rank.waits_for_ranks_ms is not None:  # the network is as it was
            changed["waits_for_ranks_ms"] = rank.waits_for_ranks_ms * by_phase["backward"]
            changed["allreduce_wait_ms"] = rank.allreduce_wait_ms + changed["waits_for_ranks_ms"] - rank.waits_for_ranks_ms
        if rank.loader_wait_ms is not None:
            changed["loader_wait_ms"] = rank.loader_wait_ms * by_phase["data"]
        return replace(rank, **changed, step_ms=rank.step_ms * step)

    clock = replace(e.clock, train_s=e.clock.train_s * step) if e.clock is not None else None
    return replace(e, ranks=tuple(map(grown, e.ranks)), clock=clock)


def slowdown(e: Evidence) -> Cause | None:
    """What steps compute, or their wait for images, grew in the course of the run by more than the clocks did: T' = T - that.

    Nothing of it can be fixed in the experiment; it is named with what to look at. The growth has to stand out of what epochs
    differ by, and to be there in the last third of them.
    """
    one = fallen(e)
    lost = clocks_lost(e, one) if one is not None and not one.since_start else None
    computing, loading = growth(e.epochs, computing_ms, lost), growth(e.epochs, data_ms)
    grown, steps = computing or loading, e.steps_per_epoch or 1
    if grown is None:
        return None
    part_ms = grown.more_ms / fmean(epoch.step_ms for epoch in latest(e.epochs)) * e.typical.step_ms
    clocks = f"; lower clocks cost {100 * lost[-1]:.0f}% of a step, the rest has another cause" if lost and lost[-1] else ""
    most = f", most of it in {grown.phase}" if grown.phase else ""
    where = "who else uses these GPUs (nvidia-smi)" if e.on_gpu else "who else uses these cores (top)"
    return Cause(
        "slowdown",
        f"what an epoch's steps {'compute' if computing else 'wait for images'} grew from {grown.fast_ms * steps / 1e3:.1f} to "
        f"{grown.late_ms * steps / 1e3:.1f} s{most}{clocks}: another job on the node, perhaps; no record shows which",
        f"see to {where if computing else 'the disk, the network and the cores that the loader shares'} while it goes on, then "
        "measure again",
        Effect(work_ms=part_ms, cpu_ms=e.cpu_of(part_ms)) if computing else Effect(supply_ms=part_ms, late_ms=part_ms),
    )
