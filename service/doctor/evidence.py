"""What the doctor knows of a run: plain numbers out of its records. None where a record does not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

LEAST_PCT = 5.0
"""A predicted gain below this is not worth a finding."""


@dataclass(frozen=True)
class RankTimes:
    """Mean milliseconds of one rank's step."""

    data_ms: float
    h2d_ms: float
    augment_ms: float
    teacher_ms: float
    student_ms: float
    backward_ms: float
    """With the waits for the all-reduce and for other ranks."""
    optimizer_ms: float
    step_ms: float
    allreduce_wait_ms: float | None = None
    """Of the backward: from this rank's last gradient to the end of the last all-reduce."""
    allreduce_wait_p50_ms: float | None = None
    allreduce_wait_error_ms: float | None = None
    """Standard error of the mean."""

    @property
    def before_student_ms(self) -> float:
        """From the end of the last backward to the student's forward."""
        return self.optimizer_ms + self.data_ms + self.h2d_ms + self.augment_ms + self.teacher_ms

    @property
    def rest_ms(self) -> float:
        """What lies in no phase."""
        return max(0.0, self.step_ms - self.before_student_ms - self.student_ms - self.backward_ms)


@dataclass(frozen=True)
class LoaderCosts:
    """Milliseconds of a loader thread an image."""

    image_ms: float
    read_ms: float
    """Of it inside the source."""
    cpu_ms: float
    """Of it computing."""
    threads: float


@dataclass(frozen=True)
class GpuUse:
    """One GPU over a run or an epoch, in means."""

    name: str  # node0/gpu1
    util_pct: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    throttle_reasons: int = 0


@dataclass(frozen=True)
class NodeUse:
    """One node over a run, in means."""

    cpu_pct: float | None = None
    disk_read_mib_per_s: float | None = None


@dataclass(frozen=True)
class EpochUse:
    """One epoch as it was trained."""

    step_ms: float
    eval_s: float
    gpus: tuple[GpuUse, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """One stage of a run, or one trial of a sweep."""

    global_batch: int
    ranks: tuple[RankTimes, ...]
    """One entry a worker."""
    loader_workers: int = 1
    accumulate: int = 1
    precision: str = "fp32"
    decodes_on_device: bool = False
    loader: LoaderCosts | None = None
    one_image_ms: float | None = None
    further_image_ms: float | None = None
    """What each image beside the first adds; where a CPU does the work."""
    nodes: tuple[NodeUse, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    peak_memory_mib: float | None = None
    gpu_memory_mib: float | None = None
    steps_per_epoch: int | None = None
    val_images: float = 0.0
    epochs: tuple[EpochUse, ...] = ()
    teacher_actors: int | None = None
    """Of `teacher.service`: what a step then spends on its teacher is waiting. None: a teacher in each worker, or none."""

    @property
    def num_workers(self) -> int:
        return len(self.ranks)

    @property
    def on_gpu(self) -> bool:
        """Whether the work is done by GPUs, which a CPU launches."""
        return bool(self.gpus) or self.peak_memory_mib is not None

    @property
    def rank_batch(self) -> float:
        """Images of one rank's step."""
        return self.global_batch / self.num_workers

    @property
    def typical(self) -> RankTimes:
        """The median rank, phase by phase (the lower one of two): what a step is like but for its slowest ranks."""

        def middle(of: Callable[[RankTimes], float]) -> float:
            return median_low(of(rank) for rank in self.ranks)

        return RankTimes(
            middle(lambda r: r.data_ms), middle(lambda r: r.h2d_ms), middle(lambda r: r.augment_ms),
            middle(lambda r: r.teacher_ms), middle(lambda r: r.student_ms), middle(lambda r: r.backward_ms),
            middle(lambda r: r.optimizer_ms), middle(lambda r: r.step_ms),
        )  # fmt: skip

    @property
    def rest_ms(self) -> float:
        """What of a step lies in no phase, on the median rank."""
        return median_low(rank.rest_ms for rank in self.ranks)

    @property
    def exposed_ms(self) -> float | None:
        """What the all-reduce itself keeps a step waiting: the last rank to arrive waits for nothing else.

        The median step of the rank that waits least, since ranks may be last in turn.
        """
        waits = [rank.allreduce_wait_p50_ms for rank in self.ranks if rank.allreduce_wait_p50_ms is not None]
        return min(waits) if waits else None

    @property
    def uneven_ms(self) -> float:
        """What every rank, even the one that waits least, waits for others that are late in turn."""
        waits = [rank.allreduce_wait_ms for rank in self.ranks if rank.allreduce_wait_ms is not None]
        return max(0.0, min(waits) - (self.exposed_ms or 0.0)) if waits else 0.0

    def own_backward_ms(self, rank: RankTimes) -> float:
        """A rank's backward without its waits. Ranks wait for the slowest, so that nobody computes longer than the least."""
        least = min(other.backward_ms for other in self.ranks)
        return min(least, rank.backward_ms - (rank.allreduce_wait_ms or 0.0))

    @property
    def compute_ms(self) -> float:
        """The models' own work in a step: forward of both, loss, backward."""
        step = self.typical
        teacher_ms = step.teacher_ms if self.teacher_actors is None else 0.0
        return teacher_ms + step.student_ms + min(self.own_backward_ms(rank) for rank in self.ranks)

    @property
    def service_ms(self) -> float:
        """What a step waits for the teacher's service."""
        return self.typical.teacher_ms if self.teacher_actors is not None else 0.0

    def own_student_ms(self, rank: RankTimes) -> float:
        """A rank's forward without its wait for rank 0, which gives all ranks its batch statistics as their forward begins."""
        late_ms = max(0.0, self.ranks[0].before_student_ms - rank.before_student_ms)
        return max(rank.student_ms - late_ms, min(other.student_ms for other in self.ranks))

    def own_ms(self, rank: RankTimes) -> float:
        """What a rank does in a step without waiting for others."""
        return rank.before_student_ms + self.own_student_ms(rank) + self.own_backward_ms(rank)

    def node_of(self, rank: int) -> int | None:
        """The node of a rank: Ray Train numbers the ranks node by node. None where nodes cannot have as many ranks each."""
        num_nodes = max(1, len(self.nodes))
        return rank * num_nodes // self.num_workers if self.num_workers % num_nodes == 0 else None


@dataclass(frozen=True)
class Finding:
    """One thing that a step's, or an epoch's, time is lost to."""

    cause: str
    sentence: str
    change: str
    gain_pct: float
    """Predicted: how much less time the same images take once that is changed."""


def gain_pct(before_ms: float, after_ms: float) -> float:
    """100 · (1 - T'/T), not below 0."""
    return max(0.0, 100 * (1 - after_ms / before_ms)) if before_ms > 0 else 0.0
