"""The recorded numbers of a run, and what follows from them: its steps' waits, supply of images and work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median_low
from typing import Any, TypeVar

from service.doctor.recorded import Clock, EpochUse, GpuUse, LoaderCosts, NodeUse, RankTimes

Item = TypeVar("Item")
MIN_GAIN_PCT = 5.0  # a predicted gain below this is not worth a finding
KEEPS_UP = 0.5  # a loader that is busy for less of a step is fast enough on average; single batches may still be late
MIN_SWAP_MIB_PER_S = 1.0  # at a higher rate of reads from swap space, the training itself is swapping


@dataclass(frozen=True)
class Evidence:
    """One stage of a run, or one trial of a sweep."""

    global_batch: int
    ranks: tuple[RankTimes, ...]
    loader_workers: int = 1
    accumulate: int = 1
    precision: str = "fp32"
    decodes_on_device: bool = False
    exposed_ms: float = 0.0  # the all-reduce's own part: the last rank to arrive waits for nothing else
    prefetch_batches: int = 2
    loader: LoaderCosts = field(default_factory=LoaderCosts)
    copy_batch_ms: float | None = None
    one_image_ms: float | None = None  # augmentation, both models' passes and the loss
    passes_ms: Mapping[int, float] = field(default_factory=dict)  # the same by number of images: a micro-batch, and larger ones
    out_of_memory_images: float | None = None
    nodes: tuple[NodeUse, ...] = ()
    rank_nodes: tuple[int, ...] = ()  # () where it is not recorded
    gpus: tuple[GpuUse, ...] = ()
    peak_memory_mib: float | None = None
    gpu_memory_mib: float | None = None
    steps_per_epoch: int | None = None
    train_images: int | None = None
    num_epochs: int | None = None
    evaluate_every: int = 1
    compile: bool | str = False
    val_images: float = 0.0
    epochs: tuple[EpochUse, ...] = ()
    clock: Clock = field(default_factory=Clock)
    pipeline_stages: int = 1
    micro_batches: int = 1
    teacher_actors: int | None = None  # of `teacher.service`: a step then waits for its teacher

    @property
    def num_workers(self) -> int:
        return len(self.ranks)

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs do the work, launched by the CPU."""
        return bool(self.gpus) or self.peak_memory_mib is not None

    @property
    def rank_batch(self) -> float:
        """Images per step of one rank."""
        return self.global_batch * self.pipeline_stages / self.num_workers

    @property
    def micro_batch(self) -> int:
        """Images per forward pass of one rank."""
        return max(1, int(self.rank_batch) // (self.accumulate * self.micro_batches))

    @cached_property
    def typical(self) -> RankTimes:
        """The median over ranks of each number (the lower of two), which leaves out the slowest ranks."""
        found: dict[str, Any] = {}
        for name in RankTimes.__dataclass_fields__:
            # Only first pipeline stages have a loader.
            ranks = self.ranks[:: self.pipeline_stages] if name == "data_ms" else self.ranks
            known = [value for rank in ranks if (value := getattr(rank, name)) is not None]
            found[name] = median_low(known) if known else None
        return RankTimes(**found)

    @property
    def step_ms(self) -> float:
        return self.typical.step_ms

    # What a step waits for

    @property
    def in_series(self) -> bool:
        """Whether a step first loads its images and then computes. A GPU computes while its host's thread loads."""
        return not self.loader_workers and not self.on_gpu

    @property
    def data_wait_ms(self) -> float:
        """How long a step waits for its loader threads, or without any, for its own thread to load a batch."""
        step = self.typical
        known = step.loader_wait_ms if self.loader_workers else None
        return step.data_ms if known is None else min(step.data_ms, known)

    @property
    def waits_for_data(self) -> bool:
        """Whether this wait is worth a finding."""
        return 100 * self.data_wait_ms >= MIN_GAIN_PCT * self.step_ms

    @property
    def is_late(self) -> bool:
        """Whether a step waits for single late batches of a loader that is fast enough on average."""
        batch_ms = self.typical.loader_batch_ms
        return bool(self.loader_workers) and self.waits_for_data and batch_ms is not None and batch_ms < KEEPS_UP * self.step_ms

    @property
    def supply_ms(self) -> float:
        """The shortest time between two batches of the slowest rank's loader, for which all ranks wait."""
        return max(map(self.supply_of, self.ranks))

    def supply_of(self, rank: RankTimes) -> float:
        """Return the shortest time between two batches of one rank's loader.

        It is recorded at the end of a run. Before that, the loader of the rank that waits longest for images is taken to be as
        slow as the step, and others' to be faster by the difference in their waits.
        """
        if self.in_series:
            return rank.data_ms
        if rank.loader_batch_ms is not None:
            return min(rank.step_ms, rank.loader_batch_ms)
        longest_ms = max(other.data_ms for other in self.ranks)
        return rank.step_ms - (longest_ms - rank.data_ms) if 100 * longest_ms >= MIN_GAIN_PCT * rank.step_ms else 0.0

    @property
    def copy_ms(self) -> float:
        """The shortest time between two batches of the copy to a GPU, which overlaps the step."""
        if not self.on_gpu:
            return 0.0
        if self.copy_batch_ms is not None:
            return min(self.step_ms, self.copy_batch_ms)
        return self.step_ms if 100 * self.typical.h2d_ms >= MIN_GAIN_PCT * self.step_ms else 0.0

    @property
    def service_ms(self) -> float:
        """How long a step waits for the teacher's service."""
        return self.typical.teacher_ms if self.teacher_actors is not None else 0.0

    @property
    def outside_ms(self) -> float:
        """Milliseconds per step of evaluations, checkpoints and reports; 0 in a timing run, which has none."""
        if self.clock.train_s > 0:
            return self.step_ms * (self.clock.wall_s / self.clock.train_s - 1)
        return 1e3 * self.eval_s / self.steps_per_epoch if self.steps_per_epoch else 0.0

    @property
    def eval_s(self) -> float:
        """Mean evaluation time per epoch."""
        return fmean(epoch.eval_s for epoch in self.epochs) if self.epochs else 0.0

    # What a step computes

    @property
    def work_ms(self) -> float:
        """The time of a step that never waits for images: the slowest rank's computing, and the all-reduce."""
        return min(self.step_ms, max(map(self.computing_ms, self.ranks)) + self.exposed_ms)

    @property
    def compute_ms(self) -> float:
        """The models' work in a step: both forward passes, loss and backward."""
        backward_ms = min(map(self.own_backward_ms, self.ranks))
        return self.typical.teacher_ms - self.service_ms + self.typical.student_ms + backward_ms

    def computing_ms(self, rank: RankTimes) -> float:
        """Return a rank's time per step without waits for images or other ranks."""
        handling_ms = 0.0
        if self.loader_workers and rank.loader_wait_ms is not None:  # the step's own thread hands batches out
            handling_ms = max(0.0, rank.data_ms - rank.loader_wait_ms)
        before_ms = handling_ms + (0.0 if self.on_gpu else rank.h2d_ms) + rank.augment_ms + rank.teacher_ms
        passes_ms = self.own_student_ms(rank) + self.own_backward_ms(rank)
        return before_ms + passes_ms + rank.optimizer_ms + rank.rest_ms

    def own_backward_ms(self, rank: RankTimes) -> float:
        """Return a rank's backward without its waits: ranks wait for the slowest, so none computes longer than the shortest."""
        if self.pipeline_stages > 1:  # stages differ in work, and waits count as the bubble
            return rank.backward_ms
        shortest_ms = min(other.backward_ms for other in self.ranks)
        return min(shortest_ms, rank.backward_ms - rank.allreduce_wait_ms)

    def own_student_ms(self, rank: RankTimes) -> float:
        """Return a rank's forward without its wait for rank 0, which broadcasts its batch statistics when forward begins.

        On average rank 0 is later by the difference of their times before forward. If its waits for images vary, it may be
        later in single steps by up to the length of these waits. See also `own_backward_ms`.
        """
        if self.pipeline_stages > 1:
            return rank.student_ms
        first, shortest_ms = self.ranks[0], min(other.student_ms for other in self.ranks)
        own_ms = rank.student_ms - max(0.0, first.before_student_ms - rank.before_student_ms)
        varies_ms = 0.0 if self.in_series else first.data_ms
        return own_ms if own_ms - shortest_ms > varies_ms else shortest_ms

    # Nodes and GPUs

    @property
    def cores(self) -> float:
        """CPU cores of all nodes, or 0 if not recorded."""
        return sum(node.cpu_cores for node in self.nodes)

    @property
    def cores_busy_pct(self) -> float:
        """Utilization of the busiest node's cores."""
        return max((node.cpu_pct for node in self.nodes), default=0.0)

    @property
    def swap_mib_per_s(self) -> float:
        """Rate of reads from swap space of the node that swaps most."""
        return max((node.swap_in_mib_per_s for node in self.nodes), default=0.0)

    @property
    def swaps(self) -> bool:
        """Whether a node is short of memory."""
        return self.swap_mib_per_s > MIN_SWAP_MIB_PER_S

    @property
    def gpus_busy_pct(self) -> float | None:
        """Mean GPU utilization, over the last third of the epochs if they are recorded."""
        uses = [gpu for epoch in last_third(self.epochs) for gpu in epoch.gpus] or self.gpus
        known = [gpu.util_pct for gpu in uses if gpu.util_pct is not None]
        return fmean(known) if known else None

    @property
    def idle_share(self) -> float:
        """The share of ranks' computing time in which their GPUs are idle, or 0 if not recorded.

        A GPU that waits for other ranks counts as busy with NCCL's kernel; one that waits for images or a service does not.
        """
        if self.gpus_busy_pct is None:
            return 0.0
        computing_ms = fmean(map(self.computing_ms, self.ranks)) - self.service_ms
        kernels_ms = self.gpus_busy_pct / 100 * self.step_ms - fmean(rank.allreduce_wait_ms for rank in self.ranks)
        return min(1.0, max(0.0, 1 - kernels_ms / computing_ms)) if computing_ms > 0 else 0.0


def last_third(epochs: Sequence[Item]) -> Sequence[Item]:
    """Return the last third, at least one item."""
    return epochs[-max(1, len(epochs) // 3) :]
