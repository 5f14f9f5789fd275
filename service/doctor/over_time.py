"""Finds steps that become slower during a run, and GPUs whose clocks are lowered by heat or power supply."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from service.doctor.evidence import MIN_GAIN_PCT, Evidence, last_third
from service.doctor.recorded import EpochUse, GpuUse, RankTimes
from service.doctor.step_model import Cause, Effect
from trainables.metrics.phases import ALL_PHASES, RECEIVE
from trainables.metrics.telemetry import SLOWING_REASONS, decode_throttle

MIN_SIGNAL = 3.0  # times the median difference between successive epochs, from which growth of steps counts
MIN_EPOCHS = 3
HOT_C = 75.0
MIN_THROTTLED_PCT = 10.0  # of the time: GPUs whose clock was lowered for less are not reported


class ThrottledGpu(NamedTuple):
    """A GPU below its reference clock."""

    gpu: GpuUse
    reference_mhz: float
    since_start: bool  # else since a later epoch
    lost: tuple[float, ...]  # share of a step that the lower clock costs, per epoch or for the whole run


def is_throttled(gpu: GpuUse) -> bool:
    """Whether heat or power supply lowers its clock for a relevant part of the time."""
    often = gpu.throttled_pct is None or gpu.throttled_pct >= MIN_THROTTLED_PCT
    return bool(int(gpu.throttle_reasons) & SLOWING_REASONS) and often


def throttled_gpu(e: Evidence) -> ThrottledGpu | None:
    """Return the throttled or hot GPU that loses most by its lower clock in the last epoch, or over the whole run."""
    epochs = [{gpu.name: gpu for gpu in gpus} for gpus in ([epoch.gpus for epoch in e.epochs] or [e.gpus])]
    # The part of a step that depends on the clock: kernels that are not hidden behind launching. The hidden share of kernels is
    # assumed to equal the GPUs' idle share.
    kernels_share = (e.work_ms - e.exposed_ms) * (1 - e.idle_share) ** 2 / e.step_ms
    found = []
    for gpu in epochs[-1].values():
        if not gpu.sm_clock_mhz or not (is_throttled(gpu) or gpu.temperature_c >= HOT_C):
            continue
        history = [gpus.get(gpu.name, GpuUse(gpu.name)) for gpus in epochs]
        free_mhz = [one.sm_clock_mhz for one in history if one.sm_clock_mhz and not is_throttled(one)]
        similar = [one for one in epochs[-1].values() if one.sm_clock_limit_mhz == gpu.sm_clock_limit_mhz]
        similar_mhz = [one.sm_clock_mhz for one in similar if one.sm_clock_mhz and not is_throttled(one)]
        # Its own clock while not throttled, else that of similar GPUs that are not, else the highest of its kind.
        reference_mhz = max(free_mhz or similar_mhz or [gpu.sm_clock_limit_mhz])
        # Epochs without a recorded clock count as no loss.
        slower = [1 - (one.sm_clock_mhz or reference_mhz) / reference_mhz if reference_mhz else 0.0 for one in history]
        if slower[-1] > 0:
            found.append(ThrottledGpu(gpu, reference_mhz, not free_mhz, tuple(kernels_share * max(0.0, part) for part in slower)))
    return max(found, key=lambda one: one.lost[-1], default=None)


class Growth(NamedTuple):
    """How much a part of the steps grew, from the fastest third of the epochs to the last third."""

    fast_ms: float
    late_ms: float
    more_ms: float  # growth that lower clocks do not explain
    phase: str  # the one that grew most, "" if not recorded


def growth(epochs: Sequence[EpochUse], of: Callable[[EpochUse], float], lost: Sequence[float] = ()) -> Growth | None:
    """Return how much `of` the epochs grew, apart from the shares `lost` to clocks, or None if less than 5% or the noise."""
    if len(epochs) < MIN_EPOCHS:
        return None
    lost = lost or [0.0] * len(epochs)
    fair_ms = [of(epoch) * (1 - part) for epoch, part in zip(epochs, lost, strict=True)]
    late = last_third(epochs)
    fast = [epochs[index] for index in sorted(range(len(epochs)), key=fair_ms.__getitem__)[: len(late)]]
    fast_ms, late_ms = median(sorted(fair_ms)[: len(late)]), median(last_third(fair_ms))
    differences = [abs(after - before) for before, after in pairwise(fair_ms)]
    if late_ms - fast_ms < max(MIN_SIGNAL * median(differences), MIN_GAIN_PCT / 100 * median(epoch.step_ms for epoch in late)):
        return None
    longer_ms = {
        phase: fmean(epoch.phases_ms.get(phase, 0.0) for epoch in late) - fmean(epoch.phases_ms.get(phase, 0.0) for epoch in fast)
        for phase in late[-1].phases_ms
    }
    return Growth(
        fast_ms=median(map(of, fast)),
        late_ms=median(map(of, late)),
        more_ms=max(0.0, fmean(of(epoch) - fast_ms / (1 - part) for epoch, part in zip(late, last_third(lost), strict=True))),
        phase=max(longer_ms, key=longer_ms.__getitem__, default=""),
    )


def computing_ms(epoch: EpochUse) -> float:
    """Return a step's time without waits for images, which hide growth of its computing if the loader or copy is slower."""
    return epoch.step_ms - data_ms(epoch) - (epoch.phases_ms.get("h2d", 0.0) if epoch.gpus else 0.0)


def data_ms(epoch: EpochUse) -> float:
    """Return a step's wait for images, which on later pipeline stages is the wait for the first stage."""
    return epoch.phases_ms.get("data", 0.0) + epoch.phases_ms.get(RECEIVE, 0.0)


def as_in_last_third(e: Evidence) -> Evidence:
    """If a run's steps have grown by more than the noise, return it with the times of the last third of its epochs.

    These are recorded for one rank; the other ranks' times are assumed to have grown equally.
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


def slower_over_time(e: Evidence) -> Iterator[Cause]:
    """Yield a GPU whose clock is lowered by heat or power supply, and steps that grew by more than the clocks explain.

    A lower clock costs (1 - clock/reference clock)·kernels of a step. The experiment cannot fix other growth of its computing
    or its wait for images, so the change says what to look at.
    """
    steps, one = e.steps_per_epoch or 1, throttled_gpu(e)
    lost: tuple[float, ...] = ()
    if one is not None:
        gpu, lost = one.gpu, () if one.since_start else one.lost
        why = f" at {gpu.temperature_c:.0f} °C" if gpu.temperature_c else ""
        if reasons := decode_throttle(SLOWING_REASONS & int(gpu.throttle_reasons)):
            why += f" ({', '.join(reasons)})"
        sentence = f"the clock of {gpu.name} is {gpu.sm_clock_mhz:,.0f} of {one.reference_mhz:,.0f} MHz all the time{why}"
        if not one.since_start:
            first_s, last_s = (steps * ms / 1e3 for ms in (min(epoch.step_ms for epoch in e.epochs), e.epochs[-1].step_ms))
            sentence = (
                f"an epoch's steps grew from {first_s:.1f} to {last_s:.1f} s while the clock of {gpu.name} fell from "
                f"{one.reference_mhz:,.0f} to {gpu.sm_clock_mhz:,.0f} MHz{why}"
            )
        yield Cause(
            "thermal throttling" if one.since_start else "thermal drift",
            sentence,
            "cool that GPU (fans, air, power limit; nvidia-smi -q -d PERFORMANCE,TEMPERATURE), or leave it out of the cluster",
            Effect(work_ms=fmean(last_third(one.lost)) * e.step_ms),
        )
    computing, loading = growth(e.epochs, computing_ms, lost), growth(e.epochs, data_ms)
    if grown := computing or loading:
        part_ms = grown.more_ms / fmean(epoch.step_ms for epoch in last_third(e.epochs)) * e.step_ms
        clocks = f"; lower clocks cost {100 * lost[-1]:.0f}% of a step, the rest has another cause" if lost else ""
        where = "who else uses these GPUs (nvidia-smi)" if e.on_gpu else "who else uses these cores (top)"
        yield Cause(
            "slowdown",
            f"what an epoch's steps {'compute' if computing else 'wait for images'} grew from {grown.fast_ms * steps / 1e3:.1f} "
            f"to {grown.late_ms * steps / 1e3:.1f} s{f', most of it in {grown.phase}' if grown.phase else ''}{clocks}: perhaps "
            "another job on the node; no record shows which",
            f"check {where if computing else 'the disk, the network and the cores that the loader shares'} while it lasts, then "
            "measure again",
            Effect(work_ms=part_ms) if computing else Effect(supply_ms=part_ms, beyond_ms=part_ms),
        )
