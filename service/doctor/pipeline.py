"""What pipeline stages wait for in each other."""

from statistics import fmean

from service.doctor.evidence import Evidence
from service.doctor.step_model import Cause, Effect


def bubble(e: Evidence) -> Cause | None:
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


def uneven_stages(e: Evidence) -> Cause | None:
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
