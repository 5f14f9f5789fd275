"""Finds ranks that all others wait for, with their nodes and the phase in which they are slow."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_low

from service.doctor.evidence import MIN_GAIN_PCT, Evidence
from service.doctor.recorded import RankTimes
from service.doctor.step_model import Cause, Effect
from trainables.metrics.phases import PHASES

MIN_STANDARD_ERRORS = 3.0  # with means of 8 batches, a difference exceeds this by chance with a probability of 1%


def straggler(e: Evidence) -> Cause | None:
    """Find ranks that compute longer than all others, or have slower loaders. Pipeline stages differ anyway, so return None."""
    if e.pipeline_stages > 1:
        return None
    computing, loading = _late(e, e.computing_ms, "compute"), _late(e, e.supply_of, "data")
    if computing is None or loading is None:
        return computing or loading
    slower_loader = replace(computing.effect, supply_ms=loading.effect.supply_ms)
    return replace(computing, change=f"{computing.change}; and {loading.change}", effect=slower_loader)


def _late(e: Evidence, own: Callable[[RankTimes], float], what: str) -> Cause | None:
    """Find ranks whose own time, without waits for other ranks, is longer.

    The widest gap in the sorted times, which must be at least 5% of a step, separates slow from fast ranks. Without the slow
    ones, work or supply shrinks by the difference between the slowest rank and the slowest fast one. It must exceed the noise of
    the waits, since healthy ranks that share cores are late in turn, sometimes for many steps in a row.
    """
    own_ms = [own(rank) for rank in e.ranks]
    order = sorted(range(e.num_workers), key=own_ms.__getitem__)
    gaps = [own_ms[slower] - own_ms[faster] for faster, slower in pairwise(order)]
    if not gaps or max(gaps) <= MIN_GAIN_PCT / 100 * e.step_ms:
        return None
    fast = order[: gaps.index(max(gaps)) + 1]
    slow = sorted(set(order) - set(fast))
    worst, next_slow = order[-1], fast[-1]
    more_ms = own_ms[worst] - own_ms[next_slow]
    # One rank waits while the other is late, so their errors are correlated and add up.
    if more_ms < MIN_STANDARD_ERRORS * sum(e.ranks[rank].allreduce_wait_error_ms for rank in (worst, next_slow)):
        return None
    phase, effect = "data", Effect(supply_ms=more_ms)
    change = "check that node's disk and free cores: its loader is late"
    if what != "data":
        phase, effect = _slow_phase(e, e.ranks[worst], [e.ranks[rank] for rank in fast]), Effect(work_ms=more_ms)
        change = "check for other jobs, clocks and heat on that node (distill report shows its telemetry), or leave it out"
    others = "all others" if 2 * len(slow) <= e.num_workers else f"{len(fast)} of {e.num_workers} ranks"
    nodes = sorted({e.rank_nodes[rank] for rank in slow}) if len(e.rank_nodes) == e.num_workers else []
    names = ", ".join(map(str, slow)) + (f" (node{', node'.join(map(str, nodes))})" if nodes else "")
    return Cause(
        "straggler",
        f"{f'rank {names} is' if len(slow) == 1 else f'ranks {names} are'} slow and {others} wait: {own_ms[worst]:.1f} ms of own "
        f"work per step, the others at most {own_ms[next_slow]:.1f}; most of the difference is in {phase}",
        change,
        effect,
    )


def _slow_phase(e: Evidence, rank: RankTimes, others: Sequence[RankTimes]) -> str:
    """Return the phase in which a rank exceeds the median of the others most."""

    def took_ms(one: RankTimes) -> dict[str, float]:
        own = {phase: getattr(one, f"{phase}_ms") for phase in PHASES if phase != "data"}
        return own | {"student": e.own_student_ms(one), "backward": e.own_backward_ms(one)}

    slow, fast = took_ms(rank), list(map(took_ms, others))
    return max(slow, key=lambda phase: slow[phase] - median_low(one[phase] for one in fast))
