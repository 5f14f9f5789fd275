"""A run as its records show it, and what follows from them: what steps wait for, supply, work, and use of the cores."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from statistics import fmean, median_low
from typing import Any

from service.doctor.recorded import Clock, EpochUse, GpuUse, LoaderCosts, NodeUse, RankTimes

LEAST_PCT = 5.0
"""A predicted gain below this is not worth a finding."""
KEEPS_UP = 0.5
"""A loader whose threads are busy for less than this part of a step supplies enough; single batches may still be late."""


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
    exposed_ms: float | None = None
    """What a step waits for the all-reduce itself: the last rank to arrive waits for nothing else."""
    prefetch_batches: int = 2
    loader: LoaderCosts | None = None
    copy_batch_ms: float | None = None
    """What a batch's copy to the GPU takes."""
    one_image_ms: float | None = None
    """Augmentation, both models' passes and the loss on a single image."""
    passes_ms: Mapping[int, float] = field(default_factory=dict)
    """The same on so many images: a micro-batch, and larger ones."""
    out_of_memory_images: float | None = None
    """So many did not fit into a GPU's memory."""
    nodes: tuple[NodeUse, ...] = ()
    rank_nodes: tuple[int, ...] = ()
    """Each rank's node, which may have another number of them than the next; () in older records."""
    gpus: tuple[GpuUse, ...] = ()
    peak_memory_mib: float | None = None
    gpu_memory_mib: float | None = None
    steps_per_epoch: int | None = None
    train_images: int | None = None
    """Of an epoch: no batch can have more."""
    num_epochs: int | None = None
    evaluate_every: int = 1
    grace_epochs: int | None = None
    """Of a sweep by asha, which needs a multiple of `evaluate_every`; None otherwise."""
    has_ended: bool = False
    """Whether the records are complete: nothing that they lack is still to come."""
    compile: bool | str = False
    """`train.compile`."""
    val_images: float = 0.0
    epochs: tuple[EpochUse, ...] = ()
    clock: Clock | None = None
    """None: of a timing run, or where it is not recorded."""
    pipeline_stages: int = 1
    micro_batches: int = 1
    """Of a replica's batch, in its pipeline."""
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
        return self.global_batch * self.pipeline_stages / self.num_workers

    @property
    def micro_batch(self) -> int:
        """Images of one rank's forward pass."""
        return max(1, int(self.rank_batch) // (self.accumulate * self.micro_batches))

    @cached_property
    def typical(self) -> RankTimes:
        """The median rank, number by number (the lower one of two): what a step is like but for its slowest ranks."""

        def middle(name: str) -> Any:
            # Of pipeline stages the first ones alone have a loader.
            ranks = self.ranks[:: self.pipeline_stages] if name == "data_ms" else self.ranks
            known = [value for rank in ranks if (value := getattr(rank, name)) is not None]
            return median_low(known) if known else None

        return RankTimes(**{field.name: middle(field.name) for field in fields(RankTimes)})

    @property
    def data_wait_ms(self) -> float:
        """What a step waits for its loader's threads; without any, for its own thread to load a batch."""
        step = self.typical
        known = step.loader_wait_ms if self.loader_workers else None
        return step.data_ms if known is None else min(step.data_ms, known)

    @property
    def waits_for_data(self) -> bool:
        """Whether what a step waits for its loader is worth a finding."""
        return 100 * self.data_wait_ms >= LEAST_PCT * self.typical.step_ms

    @property
    def is_late(self) -> bool:
        """Whether a step waits for its loader though that has time to spare: for single batches."""
        step = self.typical
        if not self.loader_workers or step.loader_batch_ms is None:
            return False
        return self.waits_for_data and step.loader_batch_ms < KEEPS_UP * step.step_ms

    @property
    def in_series(self) -> bool:
        """Whether a step first loads its images, then computes. A GPU computes while its host's thread loads."""
        return not self.loader_workers and not self.on_gpu

    @property
    def supply_ms(self) -> float:
        """The least time between two batches that every rank's loader can deliver: ranks wait for the slowest."""
        return max(self.supply_of(rank) for rank in self.ranks)

    def supply_of(self, rank: RankTimes) -> float:
        """The least time between two batches of one rank's loader.

        Where it is not recorded: that of the rank which waits longest for images is what its step waits for, if that is worth
        a finding, and the others' are less by as much as they wait less.
        """
        if self.in_series:
            return rank.data_ms
        if rank.loader_batch_ms is not None:
            return min(rank.step_ms, rank.loader_batch_ms)
        longest_ms = max(other.data_ms for other in self.ranks)
        return rank.step_ms - (longest_ms - rank.data_ms) if 100 * longest_ms >= LEAST_PCT * rank.step_ms else 0.0

    @property
    def copy_ms(self) -> float:
        """The least time between two batches that the copy to a GPU, which goes on during the step, can deliver."""
        step = self.typical
        if not self.on_gpu:
            return 0.0
        if self.copy_batch_ms is not None:
            return min(step.step_ms, self.copy_batch_ms)
        return step.step_ms if 100 * step.h2d_ms >= LEAST_PCT * step.step_ms else 0.0

    def computing_ms(self, rank: RankTimes) -> float:
        """What a rank does in a step without waiting for images or for others."""
        before_ms = self.handling_ms(rank) + (0.0 if self.on_gpu else rank.h2d_ms) + rank.augment_ms + rank.teacher_ms
        passes_ms = self.own_student_ms(rank) + self.own_backward_ms(rank)
        return before_ms + passes_ms + rank.optimizer_ms + rank.rest_ms

    def handling_ms(self, rank: RankTimes) -> float:
        """Of the data phase what is no wait: the step's own thread hands batches out."""
        if not self.loader_workers or rank.loader_wait_ms is None:
            return 0.0
        return max(0.0, rank.data_ms - rank.loader_wait_ms)

    @property
    def work_ms(self) -> float:
        """A step that never waits for images: the slowest rank's computing, and the all-reduce."""
        computing_ms = max(self.computing_ms(rank) for rank in self.ranks)
        return min(self.typical.step_ms, computing_ms + (self.exposed_ms or 0.0))

    @property
    def loader_cpu_ms(self) -> float:
        """What all ranks' loader threads compute for a step."""
        return self.loader.cpu_ms * self.global_batch if self.loader is not None else 0.0

    @property
    def training_cpu_ms(self) -> float | None:
        """What all ranks' processes compute in a step but for their loaders; None: unknown.

        A process whose GPU works is not counted: it spends its time waiting, in a loop.
        """
        if self.on_gpu:
            return 0.0
        known = [rank.cpu_ms for rank in self.ranks if rank.cpu_ms is not None]
        return max(0.0, sum(known) - self.loader_cpu_ms) if len(known) == self.num_workers else None

    @property
    def cores(self) -> float | None:
        """Of all nodes; None: unknown."""
        known = [node.cpu_cores for node in self.nodes if node.cpu_cores is not None]
        return sum(known) if known and len(known) == len(self.nodes) else None

    @property
    def cpu_ms(self) -> float:
        """What all ranks compute in a step, 0 where that is unknown: on so many cores a step takes no less than its part."""
        return self.loader_cpu_ms + (self.training_cpu_ms or 0.0)

    @property
    def others_cpu_ms(self) -> float:
        """What programs other than the ranks compute on the nodes in a step; 0 where that is unknown."""
        busy = [node.cpu_pct for node in self.nodes if node.cpu_pct is not None]
        if not busy or not self.cores or not self.training_cpu_ms:
            return 0.0
        return max(0.0, fmean(busy) / 100 * self.cores * self.typical.step_ms - self.cpu_ms)

    @property
    def competing_cpu_ms(self) -> float:
        """What all but the step's own thread compute on the nodes in a step."""
        return self.cpu_ms + self.others_cpu_ms - (self.training_cpu_ms or 0.0) / self.num_workers

    @property
    def core_wait_ms(self) -> float:
        """What every rank's step waits at least for a free core. A GPU works meanwhile."""
        return 0.0 if self.on_gpu else min(rank.core_wait_ms or 0.0 for rank in self.ranks)

    def cpu_of(self, work_ms: float) -> float:
        """What all ranks' cores do in so much of each rank's work."""
        computing_ms = sum(self.computing_ms(rank) for rank in self.ranks)
        return work_ms * self.num_workers * (self.training_cpu_ms or 0.0) / computing_ms if computing_ms > 0 else 0.0

    @property
    def outside_ms(self) -> float:
        """Evaluations, checkpoints, reports: milliseconds of them for each step. 0 of a timing run, which has none."""
        step_ms = self.typical.step_ms
        if self.clock is not None and self.clock.train_s > 0:
            return step_ms * (self.clock.wall_s / self.clock.train_s - 1)
        return 1e3 * self.eval_s / self.steps_per_epoch if self.steps_per_epoch else 0.0

    @property
    def eval_s(self) -> float:
        """Evaluation of an epoch, in the mean; 0 where none was made."""
        return fmean(epoch.eval_s for epoch in self.epochs) if self.epochs else 0.0

    def own_backward_ms(self, rank: RankTimes) -> float:
        """A rank's backward without its waits. Ranks wait for the slowest, so that nobody computes longer than the least.

        Pipeline stages have work of their own, and their waits are the bubble.
        """
        if self.pipeline_stages > 1:
            return rank.backward_ms
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
        """A rank's forward without its wait for rank 0, which gives all ranks its batch statistics as their forward begins.

        Rank 0 is later than this one in the mean by the difference of what comes before, and, where it waits for images that
        come now sooner and now later, in single steps by as much again as those waits explain. See `own_backward_ms`.
        """
        if self.pipeline_stages > 1:
            return rank.student_ms
        first, least_ms = self.ranks[0], min(other.student_ms for other in self.ranks)
        own_ms = rank.student_ms - max(0.0, first.before_student_ms - rank.before_student_ms)
        varies_ms = 0.0 if self.in_series else first.data_ms
        return max(own_ms, least_ms) if own_ms - least_ms > varies_ms else least_ms

    def node_of(self, rank: int) -> int | None:
        """The node of a rank; None where it is not recorded and there are several."""
        if len(self.rank_nodes) == self.num_workers:
            return self.rank_nodes[rank]
        return 0 if len(self.nodes) == 1 else None
