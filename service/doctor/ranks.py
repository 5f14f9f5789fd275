"""What ranks wait for in each other: a slow one, or the network."""

from __future__ import annotations

from service.doctor.evidence import LEAST_PCT, Evidence, Finding, RankTimes, gain_pct

SURE = 3.0  # standard errors: of 8 batches' means a difference of none exceeds it with a probability of 1%


def straggler(e: Evidence) -> Finding | None:
    """Ranks that all others wait for, named.

    A rank's own time is its step without its waits (`Evidence.own_ms`). Ranks that need 5% of the step more than the median are
    stragglers; without them T' = T - (the slowest rank's own time - that of the slowest other). Healthy ranks that share cores
    are late in turn, now and then for many steps on end: the difference also has to stand out of what the waits vary by.
    """
    own_ms = [e.own_ms(rank) for rank in e.ranks]
    step_ms, middle = e.typical.step_ms, sorted(own_ms)[(len(own_ms) - 1) // 2]
    slow = [r for r, own in enumerate(own_ms) if own - middle > LEAST_PCT / 100 * step_ms]
    if not slow:
        return None
    worst = max(slow, key=lambda r: own_ms[r])
    next_slow = max((r for r in range(e.num_workers) if r not in slow), key=lambda r: own_ms[r])
    others_ms = own_ms[next_slow]
    # The one waits while the other is late: their errors go together, and add up.
    error_ms = sum(e.ranks[rank].allreduce_wait_error_ms or 0.0 for rank in (worst, next_slow))
    if own_ms[worst] - others_ms < SURE * error_ms:
        return None
    nodes = sorted({node for r in slow if (node := e.node_of(r)) is not None})
    whole_node = len(e.nodes) > 1 and len(nodes) == 1 and slow == [r for r in range(e.num_workers) if e.node_of(r) in nodes]
    ranks = ("rank " if len(slow) == 1 else "ranks ") + ", ".join(map(str, slow))
    where = f" (node{', node'.join(map(str, nodes))})" if nodes else ""
    who = f"node{nodes[0]} ({ranks})" if whole_node else f"{ranks}{where}"
    phase = longest(e, e.ranks[worst])
    change = "see to other jobs, clocks and heat on that node (distill report shows its telemetry), or leave it out"
    if phase == "data":
        change = "see to that node's disk and free cores: its loader is late"
    return Finding(
        "straggler",
        f"{who} {'is' if len(slow) == 1 else 'are'} slow and all others wait: {own_ms[worst]:.1f} ms of own work a step, the "
        f"others at most {others_ms:.1f}; most of the difference is in {phase}",
        change,
        gain_pct(step_ms, step_ms - (own_ms[worst] - others_ms)),
    )


def uneven(e: Evidence) -> Finding | None:
    """Ranks that are late in turn, none of them always: T' = T - what even the rank that waits least waits for others.

    Nothing where a few steps of a disturbed machine are all of it: the wait has to stand out of what it varies by.
    """
    step_ms = e.typical.step_ms
    least = min(e.ranks, key=lambda rank: rank.allreduce_wait_ms or 0.0)
    if e.uneven_ms < SURE * (least.allreduce_wait_error_ms or 0.0):
        return None
    return Finding(
        "uneven ranks",
        f"ranks are late in turn, and the others wait: on every rank {e.uneven_ms:.1f} of a step's {step_ms:.1f} ms",
        "leave each worker its cores (--set scale.cpus_per_worker=…, fewer data.loader_workers), and see how data_s varies",
        gain_pct(step_ms, step_ms - e.uneven_ms),
    )


def longest(e: Evidence, rank: RankTimes) -> str:
    """The phase in which a rank exceeds the typical one most."""
    step = e.typical
    least_backward_ms = min(e.own_backward_ms(other) for other in e.ranks)
    excess = {
        "data": rank.data_ms - step.data_ms, "h2d": rank.h2d_ms - step.h2d_ms, "augment": rank.augment_ms - step.augment_ms,
        "teacher": rank.teacher_ms - step.teacher_ms, "student": e.own_student_ms(rank) - step.student_ms,
        "backward": e.own_backward_ms(rank) - least_backward_ms, "optimizer": rank.optimizer_ms - step.optimizer_ms,
    }  # fmt: skip
    return max(excess, key=lambda phase: excess[phase])


def all_reduce(e: Evidence) -> Finding | None:
    """Every rank, even the last to arrive, waits for the gradients' all-reduce: T' = T - the least wait of all ranks."""
    step = e.typical
    if e.exposed_ms is None:
        return None
    return Finding(
        "all-reduce-bound",
        f"on every rank {e.exposed_ms:.1f} of a step's {step.step_ms:.1f} ms wait for the gradients' all-reduce",
        f"fewer of them for the same images: --set data.global_batch_size={2 * e.global_batch}; fewer nodes; or a faster "
        "network (NCCL_DEBUG=INFO says which one is used)",
        gain_pct(step.step_ms, step.step_ms - e.exposed_ms),
    )
