"""GPUs whose clocks are lowered by heat or power supply."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

from service.doctor.compute import idle_share
from service.doctor.evidence import Evidence
from service.doctor.recorded import GpuUse
from service.doctor.step_model import Cause, Effect
from trainables.metrics.telemetry import SLOWING_REASONS, decode_throttle

HOT_C = 75.0
OFTEN_PCT = 10.0
"""A GPU whose clock was lowered for less of the time is not reported."""
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


def thermal_throttling(e: Evidence) -> Cause | None:
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


def latest(epochs: Sequence[Item]) -> Sequence[Item]:
    """The last third, one at least."""
    return epochs[-max(1, len(epochs) // 3) :]
