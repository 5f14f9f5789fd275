"""One training job on one rank, as built and run by `trainables.engine.train`."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from trainables.config import TrainConfig
from trainables.data.loader.loader import Loader
from trainables.device.device_batches import DeviceBatch
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.engine.backbone_evaluation import BackboneEvaluation
from trainables.engine.checkpoint import CheckpointState, Progress
from trainables.engine.checkpoint_evaluation import Evaluation
from trainables.engine.checkpoint_writer import CheckpointWriter
from trainables.engine.interruptions import Interruptions
from trainables.engine.job_metrics import JobMetrics
from trainables.engine.passes import Epochs, TrainState
from trainables.metrics.phase_timer import PhaseTimer, StepTimes
from trainables.metrics.report import Report
from trainables.metrics.throughput import Window
from trainables.rundir import StageDir
from trainables.stage_result import TeacherAccuracy

TrainStep = Callable[[DeviceBatch, int, PhaseTimer], None]
"""Trains on a batch, given the step's index: see `trainables.engine.train.train_step`."""

Logits = Callable[[DeviceBatch], Tensor | None]
"""Returns the student's logits for an evaluation batch, or None if another rank has them."""


class Snapshot(Protocol):
    """Returns telemetry of the nodes since the last call or, with `whole`, since the job began. Every rank must call it."""

    def __call__(self, whole: bool = False) -> dict[str, float]: ...


class Evaluator(Protocol):
    """Runs `CheckpointEvaluation` in another process, for one checkpoint at a time.

    Its waits signal progress of the job: while it starts, and as long as the evaluation makes progress.
    """

    def start(self) -> bool:
        """Return whether it runs, after starting it if there is room."""

    def begin(self, config: TrainConfig, path: Path, step: int) -> None:
        """Begin to evaluate the checkpoint of `step` at `path`, which stays there until `is_done`."""

    def is_done(self, timeout_s: float = 0.0) -> bool:
        """Return whether the evaluation that has begun has ended, after waiting for at most `timeout_s`.

        Raises EvaluatorDiedError: it has died, and there is no room for another.
        """

    def result(self) -> Evaluation:
        """Return the result once `is_done`. Raises what the evaluation raised."""


class PendingLine(NamedTuple):
    """A log line about the steps since the previous one, whose numbers may still be on their way from the device."""

    step: int
    """Number of steps so far."""
    step_in_epoch: int
    lr: float
    window: Window
    phases: StepTimes
    sums: Callable[[], list[list[Any]]]
    """Waits for the sums of the steps and the checksums of the replicas, over all ranks."""


@dataclass(kw_only=True)
class Job:
    """Everything that a training job has on this rank."""

    config: TrainConfig
    group: Group
    stage: StageDir
    train_loader: Loader
    val_loader: Loader
    train_state: TrainState
    train_step: TrainStep
    logits: Logits
    checkpoint_state: CheckpointState
    metrics: JobMetrics
    report: Report
    disk: DiskWriter
    """Writes checkpoints in order, and also the records of `report` if that uses it."""
    checkpoints: CheckpointWriter
    telemetry: Snapshot
    interruptions: Interruptions
    backbone_evaluation: BackboneEvaluation | None = None
    """None for a student with a classifier."""
    evaluator: Evaluator | None = None
    """On rank 0, with `eval.asynchronous`."""
    last_is_best: bool = False
    """Whether the next save first copies `last`, the checkpoint of the epoch that was evaluated last, to `best`."""
    stop_early: Callable[[Sequence[float]], bool] | None = None
    """Whether a timing run may end, given its step times in seconds past the warm-up. None: run all steps."""
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closes the loaders, the teacher and the disk writer."""
    teachers: list[TeacherAccuracy | None] = field(default_factory=list)
    """Accuracies of the teachers with given weights, once `run_job` has measured them."""
    writes_log_late: bool = False
    """Whether a log line is written only when the next one begins, see `log_lines`."""
    log_line: PendingLine | None = None
    """The log line whose numbers are still on their way to the host."""
    logged_skips: set[tuple[Loader, int]] = field(default_factory=set)
    """Unreadable images that have been logged, by loader and index."""

    @property
    def student(self) -> nn.Module:
        """The bare student, or this rank's pipeline stage of it. Training calls `train_state.update.module`, which wraps it."""
        return self.train_state.distillation_module.student

    @property
    def epochs(self) -> Epochs:
        return self.train_state.epochs

    @property
    def progress(self) -> Progress:
        return self.checkpoint_state.progress

    def close(self) -> None:
        """End all threads and processes of the job and release their resources. The job cannot train any more."""
        self.resources.close()
