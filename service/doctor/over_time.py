"""What a single step does not show: GPUs whose clocks are lowered, steps that grow, and what lies between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import methodcaller
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from service.doctor.compute import idle_share
from service.doctor.evidence import LEAST_PCT, Evidence
from service.doctor.recorded import EpochUse, GpuUse, RankTimes
from service.doctor.step_model import Cause, Effect
from trainables.metrics.phases import ALL_PHASES
from trainables.metrics.telemetry import SLOWING_REASONS, decode_throttle

HOT_C = 75.0
OFTEN_PCT = 10.0
"""A GPU whose clock was lowered for less of the time is not reported."""
SURE = 3.0
"""Steps that grow have to grow by so many times what epochs differ by from one to the next."""
FEWEST_EPOCHS = 3
Item = TypeVar("Item")


class Fallen(NamedTuple):
    """A GPU below the clock that it could have."""

    gpu: GpuUse
    could_mhz: float
    since_start: bool
    """It never had that clock in this run."""

    def lost(self, clock_mhz: float | None) -> float:
        """What kernels at this clock take longer, as a part of what they take."""
        return max(0.0, 1 - clock_mhz / self.could_mhz) if clock_mhz else 0.0

    @property
    def share(self) -> float:
        """`lost`, as it is now."""
        return self.lost(self.gpu.sm_clock_mhz)


def is_throttled(gpu: GpuUse) -> bool:
    """Whether its clock is lowered because of heat or power supply, more than now and then."""
    often = gpu.throttled_pct is None or gpu.throttled_pct >= OFTEN_PCT
    return bool(gpu.throttle_reasons & SLOWING_REASONS) and often


def fallen(e: Evidence) -> Fallen | None:
    """The GPU that is furthest below its clock and hot, as it is now: in the last epoch, or all the time.

    What it could have is what it had in the fastest epoch. Where it never had more, what GPUs of the same kind have that are
    not throttled, or else the most that this kind can have.
    """
    now = e.epochs[-1].gpus if e.epochs else e.gpus
    fastest = {gpu.name: gpu for gpu in min(e.epochs, key=lambda epoch: epoch.step_ms).gpus} if e.epochs else {}
    found = []
    for gpu in now:
        if gpu.sm_clock_mhz is None or not (is_throttled(gpu) or (gpu.temperature_c or 0.0) >= HOT_C):
            continue
        before = fastest.get(gpu.name, gpu)
        same_kind = [other for other in now if other.sm_clock_limit_mhz == gpu.sm_clock_limit_mhz and not is_throttled(other)]
        peers = [other.sm_clock_mhz for other in same_kind if other.sm_clock_mhz]
        if before.sm_clock_mhz and gpu.sm_clock_mhz < before.sm_clock_mhz and not is_throttled(before):
            found.append(Fallen(gpu, before.sm_clock_mhz, since_start=False))
        elif is_throttled(before) and is_throttled(gpu) and (could_mhz := max(peers, default=gpu.sm_clock_limit_mhz)):
            found.append(Fallen(gpu, could_mhz, since_start=True))
    return max(found, key=lambda one: one.share, default=None)


def kernels_share(e: Evidence) -> float:
    """The part of a step that goes with a GPU's clock: kernels that are not hidden behind the host's launching.

    GPUs are busy for 1 - idle of what the slowest rank computes. Which of that time launching takes as long is not recorded; as
    much of it as of the rest is taken to be hidden.
    """
    computing_ms = e.work_ms - (e.exposed_ms or 0.0)
    return computing_ms * (1 - (idle_share(e) or 0.0)) ** 2 / e.typical.step_ms


def clocks_lost(e: Evidence, one: Fallen) -> list[float]:
    """For each epoch the part of its steps that the clocks cost."""
    clocks = [next((gpu.sm_clock_mhz for gpu in epoch.gpus if gpu.name == one.gpu.name), None) for epoch in e.epochs]
    return [kernels_share(e) * one.lost(clock_mhz) for clock_mhz in clocks]


def thermal(e: Evidence) -> Cause | None:
    """A GPU whose clock is lowered by heat or power supply: T' = T - (1 - clock/clock it could have)·kernels.

    Where the clock fell in the course of the run, steps have grown with it: what they have grown by beyond that has another
    cause, see `slowdown`.
    """
    one = fallen(e)
    if one is None:
        return None
    part = fmean(latest(clocks_lost(e, one))) if e.epochs else kernels_share(e) * one.share
    change = "cool that GPU (fans, air, power limit; nvidia-smi -q -d PERFORMANCE,TEMPERATURE), or leave it out of the cluster"
    name = "thermal throttling" if one.since_start else "thermal drift"
    return Cause(name, clock_sentence(e, one), change, Effect(work_ms=part * e.typical.step_ms))


def clock_sentence(e: Evidence, one: Fallen) -> str:
    """By how much a GPU's clock is lowered, since when, how hot it is, and why."""
    gpu, heat = one.gpu, f" at {one.gpu.temperature_c:.0f} °C" if one.gpu.temperature_c else ""
    reasons = decode_throttle(SLOWING_REASONS & gpu.throttle_reasons)
    why = f" ({', '.join(reasons)})" if reasons else ""
    if one.since_start:
        return f"the clock of {gpu.name} is {gpu.sm_clock_mhz:,.0f} of {one.could_mhz:,.0f} MHz all the time{heat}{why}"
    fastest, last, steps = min(e.epochs, key=lambda epoch: epoch.step_ms), e.epochs[-1], e.steps_per_epoch or 1
    return (
        f"an epoch's steps grew from {fastest.step_ms * steps / 1e3:.1f} to {last.step_ms * steps / 1e3:.1f} s while the clock "
        f"of {gpu.name} fell from {one.could_mhz:,.0f} to {gpu.sm_clock_mhz:,.0f} MHz{heat}{why}"
    )


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
    """A step's data phase."""
    return epoch.phase_ms("data")


def latest(epochs: Sequence[Item]) -> Sequence[Item]:
    """The last third, one at least."""
    return epochs[-max(1, len(epochs) // 3) :]


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
    step, exposed_ms = times(lambda epoch: epoch.step_ms), e.exposed_ms or 0.0

    def grown(rank: RankTimes) -> RankTimes:
        changed = {f"{phase}_ms": getattr(rank, f"{phase}_ms") * more for phase, more in by_phase.items()}
        if rank.allreduce_wait_ms is not None:  # for other ranks; the network is as it was
            for_ranks_ms = max(0.0, rank.allreduce_wait_ms - exposed_ms)
            changed["allreduce_wait_ms"] = exposed_ms + for_ranks_ms * by_phase["backward"]
        if rank.loader_wait_ms is not None:
            changed["loader_wait_ms"] = rank.loader_wait_ms * by_phase["data"]
        return replace(rank, **changed, step_ms=rank.step_ms * step)

    clock = replace(e.clock, train_s=e.clock.train_s * step) if e.clock is not None else None
    return replace(e, ranks=tuple(map(grown, e.ranks)), clock=clock)


def slowdown(e: Evidence) -> Cause | None:
    """What steps compute, or their wait for images, grew in the course of the run by more than the clocks did: T' = T - that.

    Nothing of it can be mended in the experiment; it is named with what to look at. The growth has to stand out of what epochs
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


def evaluation(e: Evidence) -> Cause | None:
    """Evaluations that take much of an epoch: with one in k epochs, k the least for which they take 5%, they cost 1/k."""
    if not e.eval_s or not e.steps_per_epoch:
        return None
    step = e.typical
    steps_s = e.steps_per_epoch * step.step_ms / 1e3
    could_s = e.val_images / e.num_workers * step.student_ms / e.rank_batch / 1e3
    every = max(2, math.ceil(e.eval_s / (LEAST_PCT / 100 * steps_s)))
    if e.num_epochs is not None:
        every = min(every, max(1, e.num_epochs // e.evaluate_every))
    every_epochs, grace = every * e.evaluate_every, ""
    if e.grace_epochs is not None and e.grace_epochs % every_epochs:
        grace = f" --set sweep.grace_epochs={max(every_epochs, e.grace_epochs // every_epochs * every_epochs)}"
    faster = f", or load its images faster: --set data.loader_workers={2 * max(1, e.loader_workers)}, or distill pack"
    loading = "" if could_s > 0.5 * e.eval_s else faster
    return Cause(
        "evaluation",
        f"evaluating {e.val_images:,.0f} images takes {e.eval_s:.1f} s, an epoch's steps {steps_s:.1f} s; the "
        f"student's forward on them takes {could_s:.1f} s",
        f"--set train.evaluate_every={every_epochs}{grace}{loading}",
        Effect(outside_ms=1e3 * e.eval_s / e.steps_per_epoch * (1 - 1 / every)),
    )


def checkpoints(e: Evidence) -> Cause | None:
    """Checkpoints are written while nothing is trained."""
    if e.clock is None or not e.clock.train_s:
        return None
    return Cause(
        "checkpoints",
        f"checkpoints take {e.clock.checkpoint_s:.1f} of {e.clock.wall_s:.1f} s",
        "--set train.checkpoint_every to more steps, where an epoch has several, or a runs' folder on a faster disk",
        Effect(outside_ms=e.typical.step_ms * e.clock.checkpoint_s / e.clock.train_s),
    )


def between_epochs(e: Evidence) -> Cause | None:
    """Reports and checks at the end of an epoch."""
    if e.clock is None or not e.clock.train_s:
        return None
    return Cause(
        "between epochs",
        f"what lies between steps, evaluations and checkpoints takes {e.clock.other_s:.1f} of {e.clock.wall_s:.1f} s",
        "epochs as short as these pay for their beginning and end: fewer workers, or more steps an epoch (a smaller batch)",
        Effect(outside_ms=e.typical.step_ms * e.clock.other_s / e.clock.train_s),
    )
