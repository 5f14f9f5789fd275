"""Steps that grow in the course of a run, and GPUs whose clocks are lowered by heat or power supply."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from service.doctor.evidence import MIN_GAIN_PCT, Evidence, last_third
from service.doctor.recorded import EpochUse, GpuUse, RankTimes
from service.doctor.step_model import Cause, Effect
from trainables.metrics.phases import ALL_PHASES, RECEIVE
from trainables.metrics.telemetry import SLOWING_REASONS, decode_throttle

SURE = 3.0
"""Steps that grow have to grow by so many times what epochs differ by from one to the next."""
MIN_EPOCHS = 3
HOT_C = 75.0
MIN_THROTTLED_PCT = 10.0
"""A GPU whose clock was lowered for less of the time is not reported."""


class ThrottledGpu(NamedTuple):
    """A GPU below the clock that it could have, or never had in this run."""

    gpu: GpuUse
    reference_mhz: float
    since_start: bool
    lost: tuple[float, ...]  # for each epoch, or else for the whole run, the part of a step that the clock costs


def is_throttled(gpu: GpuUse) -> bool:
    """Whether its clock is lowered because of heat or power supply, more than now and then."""
    often = gpu.throttled_pct is None or gpu.throttled_pct >= MIN_THROTTLED_PCT
    return bool(int(gpu.throttle_reasons) & SLOWING_REASONS) and often


def throttled_gpu(e: Evidence) -> ThrottledGpu | None:
    """The GPU that is furthest below its clock and throttled or hot, in the last epoch, or all the time.

    What it could have is what it had while it was not throttled, else what GPUs of the same kind have that are not, else the
    highest clock of this kind.
    """
    epochs = [epoch.gpus for epoch in e.epochs] or [e.gpus]
    # The part of a step that goes with the clock: kernels that are not hidden behind the host's launching, of which as much is
    # taken to be hidden as GPUs are idle.
    kernels_share = (e.work_ms - (e.exposed_ms or 0.0)) * (1 - e.idle_share) ** 2 / e.step_ms
    found = []
    for gpu in epochs[-1]:
        if not gpu.sm_clock_mhz or not (is_throttled(gpu) or (gpu.temperature_c or 0.0) >= HOT_C):
            continue
        history = [next((one for one in gpus if one.name == gpu.name), None) for gpus in epochs]
        free_mhz = [one.sm_clock_mhz or 0.0 for one in history if one is not None and not is_throttled(one)]
        alike = [one for one in epochs[-1] if one.sm_clock_limit_mhz == gpu.sm_clock_limit_mhz and not is_throttled(one)]
        others_mhz = [one.sm_clock_mhz or 0.0 for one in alike] or [gpu.sm_clock_limit_mhz or 0.0]
        reference_mhz = max(free_mhz or others_mhz)
        # No loss where an epoch has no record of the clock.
        clocks_mhz = [(one and one.sm_clock_mhz) or reference_mhz for one in history]
        lost = [kernels_share * max(0.0, 1 - mhz / reference_mhz) if reference_mhz else 0.0 for mhz in clocks_mhz]
        if lost[-1]:
            found.append(ThrottledGpu(gpu, reference_mhz, not free_mhz, tuple(lost)))
    return max(found, key=lambda one: one.lost[-1], default=None)


def thermal_throttling(e: Evidence) -> Cause | None:
    """A GPU whose clock is lowered by heat or power supply: T' = T - (1 - clock/clock it could have)·kernels.

    Where the clock fell in the course of the run, steps have grown with it: what they have grown by beyond that has another
    cause, see `slowdown`.
    """
    one = throttled_gpu(e)
    if one is None:
        return None
    gpu, why = one.gpu, f" at {one.gpu.temperature_c:.0f} °C" if one.gpu.temperature_c else ""
    if reasons := decode_throttle(SLOWING_REASONS & int(gpu.throttle_reasons)):
        why += f" ({', '.join(reasons)})"
    sentence = f"the clock of {gpu.name} is {gpu.sm_clock_mhz:,.0f} of {one.reference_mhz:,.0f} MHz all the time{why}"
    if not one.since_start:
        fastest_ms = min(epoch.step_ms for epoch in e.epochs)
        first_s, last_s = ((e.steps_per_epoch or 1) * ms / 1e3 for ms in (fastest_ms, e.epochs[-1].step_ms))
        sentence = (
            f"an epoch's steps grew from {first_s:.1f} to {last_s:.1f} s while the clock of {gpu.name} fell from "
            f"{one.reference_mhz:,.0f} to {gpu.sm_clock_mhz:,.0f} MHz{why}"
        )
    return Cause(
        "thermal throttling" if one.since_start else "thermal drift",
        sentence,
        "cool that GPU (fans, air, power limit; nvidia-smi -q -d PERFORMANCE,TEMPERATURE), or leave it out of the cluster",
        Effect(work_ms=fmean(last_third(one.lost)) * e.step_ms),
    )


class Growth(NamedTuple):
    """How a part of the steps grew, from the fastest third of the epochs to the last third."""

    fast_ms: float
    late_ms: float
    more_ms: float  # had the GPUs had the same clocks
    phase: str  # the one that grew most, "" where it is not recorded


def growth(epochs: Sequence[EpochUse], of: Callable[[EpochUse], float], lost: Sequence[float] = ()) -> Growth | None:
    """How `of` the epochs grew, of which clocks have cost the parts `lost`, if it is 5% and more than epochs differ by."""
    if len(epochs) < MIN_EPOCHS:
        return None
    lost = lost or [0.0] * len(epochs)
    fair_ms = [of(epoch) * (1 - part) for epoch, part in zip(epochs, lost, strict=True)]
    late = last_third(epochs)
    fast = [epochs[index] for index in sorted(range(len(epochs)), key=fair_ms.__getitem__)[: len(late)]]
    fast_ms, late_ms = median(sorted(fair_ms)[: len(late)]), median(last_third(fair_ms))
    differences = [abs(after - before) for before, after in pairwise(fair_ms)]
    if late_ms - fast_ms < max(SURE * median(differences), MIN_GAIN_PCT / 100 * median(epoch.step_ms for epoch in late)):
        return None

    def longer_ms(phase: str) -> float:
        return fmean(epoch.phase_ms(phase) for epoch in late) - fmean(epoch.phase_ms(phase) for epoch in fast)

    return Growth(
        fast_ms=median(map(of, fast)),
        late_ms=median(map(of, late)),
        more_ms=max(0.0, fmean(of(epoch) - fast_ms / (1 - part) for epoch, part in zip(late, last_third(lost), strict=True))),
        phase=max(late[-1].phases_ms, key=longer_ms, default=""),
    )


def computing_ms(epoch: EpochUse) -> float:
    """A step but for its waits for images: what grows behind a loader, or a copy to the GPU, that is slower still."""
    return epoch.step_ms - data_ms(epoch) - (epoch.phase_ms("h2d") if epoch.gpus else 0.0)


def data_ms(epoch: EpochUse) -> float:
    """What a step waits for its images: on later pipeline stages until the first one has them."""
    return epoch.phase_ms("data") + epoch.phase_ms(RECEIVE)


def as_in_last_third(e: Evidence) -> Evidence:
    """A run whose steps have grown, by more than epochs differ: with the phases of the last third of its epochs.

    Those are known of one rank; the others' are taken to have grown alike.
    """
    if growth(e.epochs, computing_ms) is None and growth(e.epochs, data_ms) is None:
        return e
    steps = [{**epoch.phases_ms, "step": epoch.step_ms} for epoch in e.epochs]

    def grown_by(phase: str) -> float:
        by_epoch = [step.get(phase, 0.0) for step in steps]
        return fmean(last_third(by_epoch)) / fmean(by_epoch) if any(by_epoch) else 1.0

    parts = {f"{phase}_ms": phase for phase in (*ALL_PHASES, "step")}
    parts |= {"loader_wait_ms": "data", "waits_for_ranks_ms": "backward", "allreduce_wait_ms": "backward"}

    def grown(rank: RankTimes) -> RankTimes:
        known = {name: ms for name in parts if (ms := getattr(rank, name)) is not None}
        return replace(rank, **{name: ms * grown_by(parts[name]) for name, ms in known.items()})

    clock = replace(e.clock, train_s=e.clock.train_s * grown_by("step"))
    return replace(e, ranks=tuple(map(grown, e.ranks)), clock=clock)


def slowdown(e: Evidence) -> Cause | None:
    """What steps compute, or their wait for images, grew in the course of the run by more than the clocks did: T' = T - that.

    Nothing of it can be fixed in the experiment; it is named with what to look at.
    """
    one = throttled_gpu(e)
    lost = one.lost if one is not None and not one.since_start else ()
    computing, loading = growth(e.epochs, computing_ms, lost), growth(e.epochs, data_ms)
    grown, steps = computing or loading, e.steps_per_epoch or 1
    if grown is None:
        return None
    part_ms = grown.more_ms / fmean(epoch.step_ms for epoch in last_third(e.epochs)) * e.step_ms
    clocks = f"; lower clocks cost {100 * lost[-1]:.0f}% of a step, the rest has another cause" if lost else ""
    where = "who else uses these GPUs (nvidia-smi)" if e.on_gpu else "who else uses these cores (top)"
    return Cause(
        "slowdown",
        f"what an epoch's steps {'compute' if computing else 'wait for images'} grew from {grown.fast_ms * steps / 1e3:.1f} to "
        f"{grown.late_ms * steps / 1e3:.1f} s{f', most of it in {grown.phase}' if grown.phase else ''}{clocks}: perhaps another "
        "job on the node; no record shows which",
        f"check {where if computing else 'the disk, the network and the cores that the loader shares'} while it lasts, then "
        "measure again",
        Effect(work_ms=part_ms) if computing else Effect(supply_ms=part_ms, beyond_ms=part_ms),
    )
