"""Numbers from a run's records, with the same names. A number that is not recorded is None, or 0 where that says the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankTimes:
    """Mean milliseconds of one rank's step."""

    data_ms: float
    h2d_ms: float
    augment_ms: float
    teacher_ms: float
    student_ms: float
    backward_ms: float  # including waits for the all-reduce and for other ranks
    optimizer_ms: float
    step_ms: float
    allreduce_wait_ms: float = 0.0  # from this rank's last gradient to the end of the last all-reduce
    waits_for_ranks_ms: float = 0.0  # the part beyond the wait of the rank that waits least in the same step
    allreduce_wait_error_ms: float = 0.0  # standard error of the mean
    loader_batch_ms: float | None = None  # how long this rank's loader threads are busy with a batch
    loader_wait_ms: float | None = None  # the part of the data phase that waits for them; the rest is work of the step's thread
    receive_ms: float = 0.0  # wait of a later pipeline stage for the first stage's next batch
    bubble_ms: float = 0.0  # wait of a pipeline stage for its neighbors within a step

    @property
    def before_student_ms(self) -> float:
        """From the end of the last backward to the student's forward."""
        return self.optimizer_ms + self.data_ms + self.receive_ms + self.h2d_ms + self.augment_ms + self.teacher_ms

    @property
    def rest_ms(self) -> float:
        """Time outside all phases."""
        return max(0.0, self.step_ms - self.before_student_ms - self.student_ms - self.backward_ms - self.bubble_ms)


@dataclass(frozen=True)
class LoaderCosts:
    """Milliseconds of a loader thread per image: the total and parts of it. Zeros if not recorded."""

    image_ms: float = 0.0
    read_wait_ms: float = 0.0  # inside the source without computing
    cpu_ms: float = 0.0
    core_wait_ms: float = 0.0  # ready to run, while other threads had the cores

    @property
    def is_recorded(self) -> bool:
        return self.image_ms > 0

    @property
    def blocked_ms(self) -> float:
        """Waiting for something that is not a core."""
        return max(0.0, self.image_ms - self.cpu_ms - self.core_wait_ms)

    @property
    def storage_ms(self) -> float:
        """Waiting for the disk or the network."""
        return min(self.read_wait_ms, self.blocked_ms)

    @property
    def lock_ms(self) -> float:
        """Blocked outside the source, where threads of one process wait only for Python's lock (GIL)."""
        return self.blocked_ms - self.storage_ms

    @property
    def decode_ms(self) -> float:
        """Computing, or waiting for a core to do so."""
        return self.image_ms - self.blocked_ms


@dataclass(frozen=True)
class GpuUse:
    """Means of one GPU over a run or an epoch."""

    name: str  # node0/gpu1
    util_pct: float | None = None
    temperature_c: float = 0.0
    sm_clock_mhz: float = 0.0
    sm_clock_limit_mhz: float = 0.0  # the highest clock of this kind of GPU
    throttle_reasons: float = 0.0  # all bits set at any time, see `trainables.metrics.telemetry.THROTTLE_REASONS`
    throttled_pct: float | None = None  # share of the time in which heat or power supply lowered the clock


@dataclass(frozen=True)
class NodeUse:
    """Means of one node over a run."""

    cpu_pct: float = 0.0
    swap_in_mib_per_s: float = 0.0
    cpu_cores: float = 0.0


@dataclass(frozen=True)
class EpochUse:
    """Times and GPU use of one epoch."""

    step_ms: float
    eval_s: float
    gpus: tuple[GpuUse, ...] = ()
    phases_ms: Mapping[str, float] = field(default_factory=dict)  # means of its steps


@dataclass(frozen=True)
class Clock:
    """Wall time of a stage in seconds: steps with their waits for data, and the time between them. Zeros in a timing run."""

    train_s: float = 0.0
    eval_s: float = 0.0
    checkpoint_s: float = 0.0
    other_s: float = 0.0
    timing_s: float = 0.0  # passes that are timed after training

    @property
    def wall_s(self) -> float:
        return self.train_s + self.eval_s + self.checkpoint_s + self.other_s + self.timing_s
