"""Ranks that all others wait for, named with their nodes and the phase in which they are slow."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_low

from service.doctor.evidence import MIN_GAIN_PCT, Evidence
from service.doctor.recorded import RankTimes
from service.doctor.step_model import Cause, Effect
from trainables.metrics.phases import PHASES

SURE = 3.0  # standard errors: of 8 batches' means a difference of none exceeds it with a probability of 1%


def straggler(e: Evidence) -> Cause | None:
    """Ranks that compute longer than all others, or whose loader is slower; pipeline stages have work of their own each."""
    if e.pipeline_stages > 1:
        return None
    computing, loading = _late(e, e.computing_ms, "compute"), _late(e, e.supply_of, "data")
    if computing is None or loading is None:
        return computing or loading
    slower_loader = replace(computing.effect, supply_ms=loading.effect.supply_ms)
    return replace(computing, change=f"{computing.change}; and {loading.change}", effect=slower_loader)


def _late(e: Evidence, own: Callable[[RankTimes], float], what: str) -> Cause | None:
    """Ranks whose own time, which waits for no other rank, is longer.

    In order of that, the widest gap parts the slow ranks from the others, however many they are: it has to be 5% of a step.
    Without them work, or supply, is less by the slowest rank's own time minus that of the slowest other.
    Healthy ranks that share cores are late in turn, now and then for many steps on end: the difference also has to stand out of
    what the waits vary by.
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
    # The one waits while the other is late: their errors go together, and add up.
    if more_ms < SURE * sum(e.ranks[rank].allreduce_wait_error_ms or 0.0 for rank in (worst, next_slow)):
        return None
    phase, effect = "data", Effect(supply_ms=more_ms)
    change = "check that node's disk and free cores: its loader is late"
    if what != "data":
        phase, effect = _slow_phase(e, e.ranks[worst], [e.ranks[rank] for rank in fast]), Effect(work_ms=more_ms)
        change = "check for other jobs, clocks and heat on that node (distill report shows its telemetry), or leave it out"
    others = "all others" if 2 * len(slow) <= e.num_workers else f"{len(fast)} of {e.num_workers} ranks"
    return Cause(
        "straggler",
        f"{_names(e, slow)} {'is' if len(slow) == 1 else 'are'} slow and {others} wait: {own_ms[worst]:.1f} ms of own work per "
        f"step, the others at most {own_ms[next_slow]:.1f}; most of the difference is in {phase}",
        change,
        effect,
    )


def _names(e: Evidence, ranks: Sequence[int]) -> str:
    """Ranks with their nodes, and nodes first where all of their ranks are among these."""
    nodes = sorted({node for rank in ranks if (node := e.node_of(rank)) is not None})
    on_nodes = [rank for rank in range(e.num_workers) if e.node_of(rank) in nodes]
    numbers = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    names = f"node{', node'.join(map(str, nodes))}"
    if len(e.nodes) > 1 and nodes and list(ranks) == on_nodes:
        return f"{names} ({numbers})"
    return f"{numbers} ({names})" if nodes else numbers


def _slow_phase(e: Evidence, rank: RankTimes, others: Sequence[RankTimes]) -> str:
    """The phase in which a rank exceeds most what is usual for the others."""
    own = {"student": e.own_student_ms, "backward": e.own_backward_ms}

    def more_ms(phase: str) -> float:
        took = own.get(phase, lambda one: float(getattr(one, f"{phase}_ms")))
        return took(rank) - median_low(map(took, others))

    return max((phase for phase in PHASES if phase != "data"), key=more_ms)
