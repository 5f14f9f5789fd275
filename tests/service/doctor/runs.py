"""Evidence of runs made up by hand: a step of 100 ms on one worker, and what is changed of it."""

from dataclasses import replace
from typing import Any

from service.doctor.evidence import Evidence
from service.doctor.recorded import LoaderCosts, NodeUse, RankTimes

RANK = RankTimes(
    data_ms=1.0,
    h2d_ms=0.5,
    augment_ms=0.5,
    teacher_ms=25.0,
    student_ms=25.0,
    backward_ms=45.0,
    optimizer_ms=2.0,
    step_ms=100.0,
    loader_batch_ms=32.0,
    loader_wait_ms=0.5,
)
LOADER = LoaderCosts(image_ms=0.5, read_wait_ms=0.05, cpu_ms=0.4, core_wait_ms=0.05)
HEALTHY = Evidence(
    global_batch=64,
    ranks=(RANK,),
    loader_workers=1,
    loader=LOADER,
    one_image_ms=2.0,
    passes_ms={64: 95.0, 128: 190.0},
    nodes=(NodeUse(60.0),),
)


def longer(rank: RankTimes, **extra_ms: float) -> RankTimes:
    """A rank whose phases, and with them its step, take so much longer."""
    changed = {f"{phase}_ms": getattr(rank, f"{phase}_ms") + ms for phase, ms in extra_ms.items()}
    if "data" in extra_ms:  # its loader is busy all the time
        changed |= {"loader_wait_ms": changed["data_ms"], "loader_batch_ms": rank.step_ms + sum(extra_ms.values())}
    return replace(rank, **changed, step_ms=rank.step_ms + sum(extra_ms.values()))


def loader(image_ms: float, *, read_wait: float = 0.0, cpu: float = 0.0, core_wait: float = 0.0) -> LoaderCosts:
    """A loader thread's milliseconds an image."""
    return LoaderCosts(image_ms, read_wait, cpu, core_wait)


def run_of(*ranks: RankTimes, **changes: Any) -> Evidence:
    """The healthy run with these ranks, each of which has 64 images. What the one that waits least waits is the all-reduce's."""
    changes = {"exposed_ms": min(rank.allreduce_wait_ms for rank in ranks)} | changes
    for_ranks = [replace(rank, waits_for_ranks_ms=rank.allreduce_wait_ms - changes["exposed_ms"]) for rank in ranks]
    return replace(HEALTHY, ranks=tuple(for_ranks), global_batch=64 * len(ranks), **changes)


def waiting(rank: RankTimes, wait_ms: float, own_wait_ms: float = 0.0) -> RankTimes:
    """A rank that waits so long for slower ones in its backward; `own_wait_ms` is the all-reduce's own part."""
    return waits(longer(rank, backward=wait_ms + own_wait_ms), wait_ms + own_wait_ms)


def waits(rank: RankTimes, ms: float) -> RankTimes:
    """A rank of whose backward so much is waiting, in every step."""
    return replace(rank, allreduce_wait_ms=ms)
