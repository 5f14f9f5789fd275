"""The model of what a step would take once a cause is fixed: all predicted gains come from it."""

from dataclasses import astuple, dataclass
from itertools import combinations

from service.doctor.evidence import MIN_GAIN_PCT, Evidence


@dataclass(frozen=True)
class Effect:
    """What a step saves once a cause is fixed, in milliseconds."""

    work_ms: float = 0.0
    supply_ms: float = 0.0  # between two batches of the slowest rank's loader
    copy_ms: float = 0.0  # between two batches that the copy to a GPU delivers; without a GPU a copy is work
    beyond_ms: float = 0.0  # what a step takes beyond its slowest part: late batches, ranks that are late in turn
    outside_ms: float = 0.0  # a step's share of what lies between steps
    threads: int = 0  # of a loader that had none: they load while the step computes


@dataclass(frozen=True)
class Cause:
    """One thing that time is lost to: what the records show of it, what to change, and what that saves."""

    name: str
    sentence: str
    change: str
    effect: Effect


@dataclass(frozen=True)
class Finding:
    """The predicted gain of fixing one cause, or two that gain only together."""

    causes: tuple[Cause, ...]
    gain_pct: float
    """100 · (1 - T'/T): how much less time the same images take once that is changed, evaluations included."""
    after: str | None = None
    """The cause that has to be fixed first; `gain_pct` is that of both together."""

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
    """max(work, supply, copy) of a step; without loader threads supply and work follow each other.

    Threads that load while the step computes take no less than their computing takes on all cores.
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
    """What a step takes beyond its slowest part, since parts vary; it is expected to take that again."""
    return max(0.0, e.step_ms - slowest_part_ms(e))


def late_ms(e: Evidence) -> float:
    """The part of that for which a step waits for images."""
    return 0.0 if e.in_series else min(e.data_wait_ms, beyond_ms(e))


def step_after_ms(e: Evidence, *effects: Effect) -> float:
    """What a step, with its share of what lies between steps, takes with these effects."""
    total = Effect(*map(sum, zip(*map(astuple, (Effect(), *effects)), strict=True)))
    more_ms = max(0.0, beyond_ms(e) - total.beyond_ms)
    return slowest_part_ms(e, total) + more_ms + max(0.0, e.outside_ms - total.outside_ms)


def predicted_pct(e: Evidence, *causes: Cause) -> float:
    """The gain once these causes are fixed."""
    now_ms = step_after_ms(e)
    return max(0.0, 100 * (1 - step_after_ms(e, *(cause.effect for cause in causes)) / now_ms)) if now_ms > 0 else 0.0


def ranked(e: Evidence, causes: list[Cause]) -> list[Finding]:
    """All that is predicted to gain 5% or more, the largest gain first, and after each what gains only together with it.

    A cause that gains nothing alone, since the step waits for another one anyway, comes after that one, with the gain of both.
    Where neither of two gains alone they are one finding. A pair gains 5 points more than its members alone, and a cause is in
    one pair at most.
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
