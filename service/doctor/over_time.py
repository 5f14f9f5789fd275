"""What a single step does not show: GPUs whose clocks are lowered, steps that grow, and what lies between steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from service.doctor.computing import busy_pct
from service.doctor.evidence import LEAST_PCT, Cause, Effect, EpochUse, Evidence, GpuUse
from trainables.telemetry import LOWERED, decode_throttle

HOT_C = 75.0
OFTEN_PCT = 10.0
"""A GPU whose clock was lowered for less of the time is not told of."""
SURE = 3.0
"""Steps that grow have to grow by so many times what epochs differ by from one to the next."""
FEWEST_EPOCHS = 3


class Fallen(NamedTuple):
    """A GPU below the clock that it could have."""

    gpu: GpuUse
    could_mhz: float
    since_start: bool
    """It never had that clock in this run."""

    @property
    def share(self) -> float:
        """What its kernels take longer, as a part of what they take."""
        return max(0.0, 1 - (self.gpu.clock_mhz or self.could_mhz) / self.could_mhz)


def is_throttled(gpu: GpuUse) -> bool:
    """Whether its clock is lowered because of heat or power supply, more than now and then."""
    often = gpu.throttled_pct is None or gpu.throttled_pct >= OFTEN_PCT
    return bool(gpu.throttle_reasons & LOWERED) and often


def fallen(e: Evidence) -> Fallen | None:
    """The GPU that is furthest below its clock and hot, as it is now: in the last epoch, or all the time.

    What it could have is what it had in the fastest epoch. Where it never had more, what GPUs of the same kind have that are
    not throttled, or else the most that this kind can have.
    """
    now = e.epochs[-1].gpus if e.epochs else e.gpus
    fastest = {gpu.name: gpu for gpu in min(e.epochs, key=lambda epoch: epoch.step_ms).gpus} if e.epochs else {}
    found = []
    for gpu in now:
        if gpu.clock_mhz is None or not (is_throttled(gpu) or (gpu.temperature_c or 0.0) >= HOT_C):
            continue
        before = fastest.get(gpu.name, gpu)
        same_kind = [other for other in now if other.clock_limit_mhz == gpu.clock_limit_mhz and not is_throttled(other)]
        peers = [other.clock_mhz for other in same_kind if other.clock_mhz]
        if before.clock_mhz and gpu.clock_mhz < before.clock_mhz and not is_throttled(before):
            found.append(Fallen(gpu, before.clock_mhz, since_start=False))
        elif is_throttled(before) and is_throttled(gpu) and (could_mhz := max(peers, default=gpu.clock_limit_mhz)):
            found.append(Fallen(gpu, could_mhz, since_start=True))
    return max(found, key=lambda one: one.share, default=None)


def kernels_ms(e: Evidence) -> float:
    """What of a step goes with a GPU's clock: the models' work and the optimizer's, as far as the GPUs are busy."""
    step, busy = e.typical, busy_pct(e)
    on_gpu_ms = e.compute_ms + step.augment_ms + step.optimizer_ms
    return min(on_gpu_ms, step.step_ms * (1.0 if busy is None else busy / 100))


class Growth(NamedTuple):
    """Steps of the last epochs and of the fastest ones."""

    fast_ms: float
    late_ms: float
    error_ms: float
    """What epochs differ by anyway."""
    phase: str
    """The one that grew most, "" where the records do not tell."""


def growth(epochs: Sequence[EpochUse]) -> Growth:
    """How the last third of the epochs differs from the fastest third."""
    count = max(1, len(epochs) // 3)
    fast, late = sorted(epochs, key=lambda epoch: epoch.step_ms)[:count], epochs[-count:]
    differences = [abs(after.step_ms - before.step_ms) for before, after in pairwise(epochs)]

    def phase_ms(some: Sequence[EpochUse], name: str) -> float:
        return fmean(epoch.phases_ms.get(name, 0.0) for epoch in some)

    return Growth(
        fast_ms=median(epoch.step_ms for epoch in fast),
        late_ms=median(epoch.step_ms for epoch in late),
        error_ms=median(differences),
        phase=max(late[-1].phases_ms, key=lambda name: phase_ms(late, name) - phase_ms(fast, name), default=""),
    )


def thermal(e: Evidence) -> Cause | None:
    """A GPU whose clock is lowered by heat or power supply. T' = T - (1 - clock/clock it could have)·(what the clock decides).

    Where the clock fell in the course of the run, steps have grown with it, and no more than by that is gained: what they have
    grown by beyond the clock's share has another cause (`slowdown`).
    """
    one = fallen(e)
    if one is None:
        return None
    part = one.share * kernels_ms(e) / e.typical.step_ms
    gpu, heat = one.gpu, f" at {one.gpu.temperature_c:.0f} °C" if one.gpu.temperature_c else ""
    reasons = [decode_throttle(bit)[0] for bit in (1 << n for n in range(16)) if bit & LOWERED & gpu.throttle_reasons]
    why = f" ({', '.join(reasons)})" if reasons else ""
    change = "cool that GPU (fans, air, power limit; nvidia-smi -q -d PERFORMANCE,TEMPERATURE), or leave it out of the cluster"
    if one.since_start:
        return Cause(
            "thermal throttling",
            f"the clock of {gpu.name} is {gpu.clock_mhz:,.0f} of {one.could_mhz:,.0f} MHz all the time{heat}{why}",
            change,
            Effect(work_ms=part * e.typical.step_ms),
        )
    fastest, last, steps = min(e.epochs, key=lambda epoch: epoch.step_ms), e.epochs[-1], e.steps_per_epoch or 1
    part = min(part, 1 - fastest.step_ms / last.step_ms)
    return Cause(
        "thermal drift",
        f"an epoch's steps grew from {fastest.step_ms * steps / 1e3:.1f} to {last.step_ms * steps / 1e3:.1f} s while the clock "
        f"of {gpu.name} fell from {one.could_mhz:,.0f} to {gpu.clock_mhz:,.0f} MHz{heat}{why}",
        change,
        Effect(work_ms=part * e.typical.step_ms),
    )


def slowdown(e: Evidence) -> Cause | None:
    """Steps that grew in the course of the run, by more than the clocks of its GPUs did.

    Nothing of it can be mended in the experiment; it is named with what to look at. The growth has to stand out of what epochs
    differ by, and to be there in the last third of them.
    """
    if len(e.epochs) < FEWEST_EPOCHS:
        return None
    grown, steps = growth(e.epochs), e.steps_per_epoch or 1
    if grown.late_ms - grown.fast_ms < SURE * grown.error_ms:
        return None
    one = fallen(e)
    clocks = one.share * kernels_ms(e) / e.typical.step_ms if one is not None and not one.since_start else 0.0
    whole = 1 - grown.fast_ms / grown.late_ms
    explained = f"; clocks explain {100 * clocks:.0f}% of that time" if clocks else ""
    most = f", most of it in {grown.phase}" if grown.phase else ""
    part = max(0.0, whole - clocks) * e.typical.step_ms
    where = "who else uses these GPUs (nvidia-smi)" if e.on_gpu else "who else uses these cores (top)"
    if grown.phase == "data":
        where = "the disk, the network and the cores that the loader shares"
    return Cause(
        "slowdown",
        f"an epoch's steps grew from {grown.fast_ms * steps / 1e3:.1f} to {grown.late_ms * steps / 1e3:.1f} s{most}{explained}: "
        "another job on the node, perhaps; the records do not tell",
        f"see to {where} while it goes on, then measure again",
        Effect(supply_ms=part) if grown.phase == "data" else Effect(work_ms=part),
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
    threads = 2 * max(1, e.loader_workers)
    loading = (
        "" if could_s > 0.5 * e.eval_s else f", or load its images faster: --set data.loader_workers={threads}, or distill pack"
    )
    return Cause(
        "evaluation",
        f"evaluating {e.val_images:,.0f} images takes {e.eval_s:.1f} s beside the {steps_s:.1f} s of an epoch's steps; the "
        f"student's forward on them takes {could_s:.1f} s",
        f"--set train.evaluate_every={every * e.evaluate_every}{loading}",
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
