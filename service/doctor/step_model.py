"""The model that predicts a step's time once a cause is fixed. All predicted gains come from it."""

from dataclasses import astuple, dataclass
from itertools import combinations

from service.doctor.evidence import MIN_GAIN_PCT, Evidence


@dataclass(frozen=True)
class Effect:
    """What a step saves once a cause is fixed, in milliseconds."""

    work_ms: float = 0.0
    supply_ms: float = 0.0  # between two batches of the slowest rank's loader
    copy_ms: float = 0.0  # between two batches that the copy to a GPU delivers; without a GPU a copy is work
    beyond_ms: float = 0.0  # beyond its slowest part: late batches, ranks that are late in turn
    outside_ms: float = 0.0  # per step, between steps
    threads: int = 0  # loader threads where there were none, which load while the step computes


@dataclass(frozen=True)
class Cause:
    """A cause of lost time: its evidence as a sentence, what to change, and what that saves."""

    name: str
    sentence: str
    change: str
    effect: Effect


@dataclass(frozen=True)
class Finding:
    """The predicted gain of fixing one cause, or two that only help together."""

    causes: tuple[Cause, ...]
    gain_pct: float
    """100 · (1 - T'/T), for the time of the same images including evaluations."""
    after: str | None = None
    """The cause to fix first, if any; `gain_pct` is then that of both together."""

    @property
    def cause(self) -> str:
        return " and ".join(cause.name for cause in self.causes)

    @property
    def sentence(self) -> str:
        return "; ".join(cause.sentence for cause in self.causes)

    @property
    def change(self) -> str:
        return "; and ".join(cause.change for cause in self.causes)


def slowest_part_ms(e: Evidence, effect: Effect = Effect()) -> float:
    """Return max(work, supply, copy) of a step, or without loader threads supply + max(work, copy).

    With new loader threads, loading and computing together cannot be faster than all cores allow.
    """
    work_ms, supply_ms = max(0.0, e.work_ms - effect.work_ms), max(0.0, e.supply_ms - effect.supply_ms)
    copy_ms = max(0.0, e.copy_ms - effect.copy_ms)
    if not e.in_series and not effect.threads:
        return max(work_ms, supply_ms, copy_ms)
    if not effect.threads:
        return max(work_ms, copy_ms) + supply_ms
    busy_ms = e.loader.cpu_ms * e.global_batch + (0.0 if e.on_gpu else work_ms * e.num_workers)
    return max(work_ms, copy_ms, supply_ms / effect.threads, busy_ms / e.cores if e.cores else 0.0)


def beyond_ms(e: Evidence) -> float:
    """Return a step's time beyond its slowest part, which comes from variation and is assumed to stay."""
    return max(0.0, e.step_ms - slowest_part_ms(e))


def late_ms(e: Evidence) -> float:
    """Return the part of `beyond_ms` that is waiting for images."""
    return 0.0 if e.in_series else min(e.data_wait_ms, beyond_ms(e))


def step_after_ms(e: Evidence, *effects: Effect) -> float:
    """Return the time per step, including the time between steps, with these effects."""
    total = Effect(*map(sum, zip(*map(astuple, (Effect(), *effects)), strict=True)))
    more_ms = max(0.0, beyond_ms(e) - total.beyond_ms)
    return slowest_part_ms(e, total) + more_ms + max(0.0, e.outside_ms - total.outside_ms)


def predicted_pct(e: Evidence, *causes: Cause) -> float:
    """Return the gain in percent once these causes are fixed."""
    now_ms = step_after_ms(e)
    return max(0.0, 100 * (1 - step_after_ms(e, *(cause.effect for cause in causes)) / now_ms)) if now_ms > 0 else 0.0


def ranked(e: Evidence, causes: list[Cause]) -> list[Finding]:
    """Return findings with a gain of at least 5%, largest first, each followed by one that only helps together with it.

    A cause that gains nothing alone, because the step waits for another one anyway, follows that one with the gain of both. If
    neither of two causes gains alone, they are one finding. A pair must gain 5 points more than its members alone, and a cause
    is in at most one pair.
    """
    alone = {cause.name: predicted_pct(e, cause) for cause in causes}
    singles = sorted((cause for cause in causes if alone[cause.name] >= MIN_GAIN_PCT), key=lambda cause: -alone[cause.name])
    others = [cause for cause in causes if cause not in singles]
    groups = {cause.name: [Finding((cause,), alone[cause.name])] for cause in singles}
    pairs = [(predicted_pct(e, *pair), pair) for pair in combinations([*singles, *others], 2)]
    paired = set[str]()
    for gain, (first, second) in sorted(pairs, key=lambda pair: -pair[0]):
        if gain - alone[first.name] - alone[second.name] < MIN_GAIN_PCT or paired & {first.name, second.name}:
            continue
        paired |= {first.name, second.name}
        if first.name not in groups:
            groups[f"{first.name} and {second.name}"] = [Finding((first, second), gain)]
        elif second.name not in groups:
            groups[first.name].append(Finding((second,), gain, after=first.name))
    return [finding for group in sorted(groups.values(), key=lambda group: -group[0].gain_pct) for finding in group]
