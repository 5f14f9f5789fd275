"""The model of what a step would take once a cause is fixed: all predicted gains come from it."""

from dataclasses import dataclass

from service.doctor.evidence import Evidence


@dataclass(frozen=True)
class Effect:
    """What is different once a cause is fixed."""

    work_ms: float = 0.0
    """Less work in a step."""
    supply_ms: float = 0.0
    """Less time between two batches of the loader."""
    copy_ms: float = 0.0
    """Less time between two batches that the copy delivers; where there is no GPU a copy is work."""
    late_ms: float = 0.0
    """Less waiting for single batches that are late."""
    beyond_ms: float = 0.0
    """Less of what else a step takes beyond its slowest part."""
    threads: int = 0
    """Of a loader that had none: they load while the step computes."""
    cpu_ms: float = 0.0
    """Less for all ranks' cores to do in a step."""
    outside_ms: float = 0.0
    """Less of what lies between the steps, for each of them."""


def after_ms(e: Evidence, *effects: Effect) -> float:
    """What a step, with its share of what lies between steps, takes with these effects.

    A step is max(work, supply, copy): less work does not shorten one that waits for images, nor do faster images one that
    computes. What a step takes beyond that maximum, since its parts vary, it is expected to take again; but where supply is the
    slowest part, a batch that is late is no more than that. Where images are loaded in series, supply and work follow each other.
    """
    late_now_ms = late_ms(e)
    late_then_ms = max(0.0, late_now_ms - sum(effect.late_ms for effect in effects))
    more_ms = max(0.0, beyond_ms(e) - late_now_ms - sum(effect.beyond_ms for effect in effects))
    between_ms = max(0.0, e.outside_ms - sum(effect.outside_ms for effect in effects))
    return slowest_part_ms(e, *effects, late_ms=late_then_ms) + more_ms + between_ms


def beyond_ms(e: Evidence) -> float:
    """What a step takes beyond its slowest part: parts vary, and ranks are late in turn."""
    return max(0.0, e.typical.step_ms - slowest_part_ms(e))


def late_ms(e: Evidence) -> float:
    """Of that what a step waits for images."""
    return 0.0 if e.in_series else min(e.data_wait_ms, beyond_ms(e))


def slowest_part_ms(e: Evidence, *effects: Effect, late_ms: float = 0.0) -> float:
    """max(work, supply, copy), where `late_ms` more than the work is waited for late batches; no less than the cores need.

    What the step's own thread waits for a core becomes less as whatever else computes on them does, by the same share.
    """
    less_cpu_ms = sum(effect.cpu_ms for effect in effects)
    less_core_wait_ms = e.core_wait_ms * min(1.0, less_cpu_ms / e.competing_cpu_ms) if e.competing_cpu_ms > 0 else 0.0
    work_ms = max(0.0, e.work_ms - sum(effect.work_ms for effect in effects) - less_core_wait_ms)
    supply_ms = max(0.0, e.supply_ms - sum(effect.supply_ms for effect in effects))
    copy_ms = max(0.0, e.copy_ms - sum(effect.copy_ms for effect in effects))
    threads = max((effect.threads for effect in effects), default=0)
    cores_ms = max(0.0, e.cpu_ms - less_cpu_ms) / e.cores if e.cores else 0.0
    if e.in_series and not threads:
        return max(work_ms, copy_ms) + supply_ms
    if threads:
        loading_cpu_ms = min(supply_ms, e.loader_cpu_ms / e.num_workers)
        return max(copy_ms, cores_ms, with_threads_ms(e, threads, work_ms + late_ms, supply_ms, loading_cpu_ms))
    return max(work_ms + late_ms, copy_ms, supply_ms, cores_ms)


def with_threads_ms(e: Evidence, threads: int, work_ms: float, load_ms: float, load_cpu_ms: float) -> float:
    """max(work, supply) of a rank whose images `threads` threads load, of which one would take `load_ms` for a batch.

    `load_cpu_ms` of that are computing. Where threads and step want more cores than there are each gets an equal share: with s
    threads for a core both take s times as long while images are loaded, L = (load + (s - 1)·load_cpu)/threads. In that time
    L/s of the work is done, and the rest follows.
    """
    computing = threads * min(1.0, load_cpu_ms / load_ms) if load_ms > 0 else 0.0
    used_cores = e.num_workers * (computing + (not e.on_gpu))
    crowding = max(1.0, used_cores / e.cores) if e.cores else 1.0
    loaded_ms = (load_ms + (crowding - 1) * load_cpu_ms) / threads
    return max(loaded_ms, work_ms + (0.0 if e.on_gpu else loaded_ms * (1 - 1 / crowding)))


@dataclass(frozen=True)
class Cause:
    """One thing that time is lost to."""

    name: str
    sentence: str
    change: str
    effect: Effect


@dataclass(frozen=True)
class Finding:
    """The predicted gain of fixing one cause, or of two that gain only together."""

    causes: tuple[Cause, ...]
    gain_pct: float
    """Predicted: how much less time the same images take once that is changed; the evaluations of a run are part of its time."""
    after: str | None = None
    """The cause that has to be fixed first, `gain_pct` being that of both together."""

    @property
    def cause(self) -> str:
        return " and ".join(cause.name for cause in self.causes)

    @property
    def sentence(self) -> str:
        return "; ".join(cause.sentence for cause in self.causes)

    @property
    def change(self) -> str:
        return "; and ".join(cause.change for cause in self.causes)


def gain_pct(before_ms: float, after_ms: float) -> float:
    """100 · (1 - T'/T), not below 0."""
    return max(0.0, 100 * (1 - after_ms / before_ms)) if before_ms > 0 else 0.0


def predicted_pct(e: Evidence, *causes: Cause) -> float:
    """The gain once these causes are fixed."""
    return gain_pct(after_ms(e), after_ms(e, *(cause.effect for cause in causes)))
