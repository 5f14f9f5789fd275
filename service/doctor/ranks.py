"""Why ranks wait for each other: a slow rank, the network, or another pipeline stage."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from statistics import fmean, median_low

from service.doctor.compute import most_times
from service.doctor.evidence import LEAST_PCT, Evidence
from service.doctor.recorded import RankTimes
from service.doctor.step_model import Cause, Effect
from trainables.metrics.phases import PHASES

SURE = 3.0  # standard errors: of 8 batches' means a difference of none exceeds it with a probability of 1%


def straggler(e: Evidence) -> Cause | None:
    """Ranks that all others wait for, named: those that compute longer, or those whose loader is slower.

    Not of pipeline stages, each of which has work of its own.
    """
    if e.pipeline_stages > 1:
        return None
    computing, loading = late(e, e.computing_ms, "compute"), late(e, e.supply_of, "data")
    if computing is None or loading is None:
        return computing or loading
    slower_loader = replace(computing.effect, supply_ms=loading.effect.supply_ms)
    return replace(computing, change=f"{computing.change}; and {loading.change}", effect=slower_loader)


def late(e: Evidence, own: Callable[[RankTimes], float], what: str) -> Cause | None:
    """Ranks whose own time, which waits for no other rank, is longer.

    In order of that, the widest gap parts the slow ranks from the others, however many they are: it has to be 5% of a step.
    Without them work, or supply, is less by the slowest rank's own time minus that of the slowest other.
    Healthy ranks that share cores are late in turn, now and then for many steps on end: the difference also has to stand out of
    what the waits vary by.
    """
    own_ms = [own(rank) for rank in e.ranks]
    order = sorted(range(e.num_workers), key=lambda r: own_ms[r])
    gaps = [own_ms[slower] - own_ms[faster] for faster, slower in pairwise(order)]
    if not gaps or max(gaps) <= LEAST_PCT / 100 * e.typical.step_ms:
        return None
    fast = order[: gaps.index(max(gaps)) + 1]
    slow = sorted(set(order) - set(fast))
    worst, next_slow = order[-1], fast[-1]
    more_ms = own_ms[worst] - own_ms[next_slow]
    # The one waits while the other is late: their errors go together, and add up.
    error_ms = sum(e.ranks[rank].allreduce_wait_error_ms or 0.0 for rank in (worst, next_slow))
    if more_ms < SURE * error_ms:
        return None
    phase, effect = "data", Effect(supply_ms=more_ms)
    change = "see to that node's disk and free cores: its loader is late"
    if what != "data":
        phase = longest(e, e.ranks[worst], [e.ranks[r] for r in fast])
        effect = Effect(work_ms=more_ms, cpu_ms=more_cpu_ms(e, slow, next_slow))
        change = "see to other jobs, clocks and heat on that node (distill report shows its telemetry), or leave it out"
    others = "all others" if 2 * len(slow) <= e.num_workers else f"{len(fast)} of {e.num_workers} ranks"
    return Cause(
        "straggler",
        f"{names_of(e, slow)} {'is' if len(slow) == 1 else 'are'} slow and {others} wait: {own_ms[worst]:.1f} ms of own work a "
        f"step, the others at most {own_ms[next_slow]:.1f}; most of the difference is in {phase}",
        change,
        effect,
    )


def names_of(e: Evidence, ranks: Sequence[int]) -> str:
    """Ranks with their nodes, and nodes first where all of their ranks are among these."""
    nodes = sorted({node for rank in ranks if (node := e.node_of(rank)) is not None})
    on_nodes = [rank for rank in range(e.num_workers) if e.node_of(rank) in nodes]
    numbers = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    names = f"node{', node'.join(map(str, nodes))}"
    if len(e.nodes) > 1 and nodes and list(ranks) == on_nodes:
        return f"{names} ({numbers})"
    return f"{numbers} ({names})" if nodes else numbers


def more_cpu_ms(e: Evidence, slow: Sequence[int], next_slow: int) -> float:
    """What the slow ranks' processes compute more than that of the slowest other; 0 where that is unknown."""
    others_ms = e.ranks[next_slow].cpu_ms
    known = [rank_cpu_ms for rank in slow if (rank_cpu_ms := e.ranks[rank].cpu_ms) is not None]
    return sum(max(0.0, rank_cpu_ms - others_ms) for rank_cpu_ms in known) if others_ms is not None else 0.0


def uneven_ranks(e: Evidence) -> Cause | None:
    """Ranks that are late in turn, none of them always: T' = T - what even the rank that waits least waits for others.

    Nothing where a few steps of a disturbed machine are all of it: the wait has to stand out of what it varies by.
    """
    waits = [
        (rank.waits_for_ranks_ms, rank.allreduce_wait_error_ms or 0.0) for rank in e.ranks if rank.waits_for_ranks_ms is not None
    ]
    uneven_ms, error_ms = min(waits, default=(0.0, 0.0))
    if uneven_ms < SURE * error_ms:
        return None
    return Cause(
        "uneven ranks",
        f"ranks are late in turn, and the others wait: on every rank {uneven_ms:.1f} of a step's {e.typical.step_ms:.1f} ms",
        "leave each worker its cores (--set scale.cpus_per_worker=…, fewer data.loader_workers), and see how data_s varies",
        Effect(beyond_ms=uneven_ms),
    )


def longest(e: Evidence, rank: RankTimes, others: Sequence[RankTimes]) -> str:
    """The phase in which a rank exceeds most what is usual for the others."""
    own: dict[str, Callable[[RankTimes], float]] = {phase: attrgetter(f"{phase}_ms") for phase in PHASES if phase != "data"}
    own |= {"student": e.own_student_ms, "backward": e.own_backward_ms}
    return max(own, key=lambda phase: own[phase](rank) - median_low(own[phase](other) for other in others))


def all_reduce_bound(e: Evidence) -> Cause | None:
    """Every rank, even the last to arrive, waits for the gradients' all-reduce: T' = T - the least wait of all ranks."""
    if e.exposed_ms is None:
        return None
    fewer = (
        f"fewer of them for the same images: --set data.global_batch_size={2 * e.global_batch}; " if most_times(e) >= 2 else ""
    )
    return Cause(
        "all-reduce-bound",
        f"on every rank {e.exposed_ms:.1f} of a step's {e.typical.step_ms:.1f} ms wait for the gradients' all-reduce",
        f"{fewer}fewer nodes; or a faster network (NCCL_DEBUG=INFO says which one is used)",
        Effect(work_ms=e.exposed_ms),
    )


def pipeline_bubble(e: Evidence) -> Cause | None:
    """Even the slowest stage waits while the pipeline fills and drains: T' = T - the part that twice the micro-batches spare.

    With work W in each of p equal stages and m micro-batches it takes (p - 1) W / m (Huang et al. 2019, GPipe):
    half as long with 2m. A later stage waits for a part of it before its step, until the first stage has drained.
    """
    if e.pipeline_stages == 1 or e.micro_batch == 1:
        return None
    waits_ms = min(rank.bubble_ms + rank.receive_ms for rank in e.ranks)
    return Cause(
        "pipeline bubble",
        f"every pipeline stage waits for its neighbours, at least {waits_ms:.1f} of a step's {e.typical.step_ms:.1f} ms",
        f"more and smaller micro-batches: --set scale.micro_batches={2 * e.micro_batches}; or fewer stages",
        Effect(beyond_ms=waits_ms / 2),
    )


def uneven_pipeline_stages(e: Evidence) -> Cause | None:
    """A stage has more work than the others: T' = T - what it computes beyond the mean of all."""
    p = e.pipeline_stages
    if p == 1 or len(e.ranks) % p:
        return None
    own_ms = [fmean(e.computing_ms(rank) for rank in e.ranks[stage::p]) for stage in range(p)]
    slowest = max(range(p), key=own_ms.__getitem__)
    return Cause(
        "uneven pipeline stages",
        f"stage {slowest} computes {own_ms[slowest]:.1f} ms of a step, and all stages {fmean(own_ms):.1f} in the mean",
        "cut the model elsewhere (scale.cut; `distill split` shows where)",
        Effect(work_ms=own_ms[slowest] - fmean(own_ms)),
    )
