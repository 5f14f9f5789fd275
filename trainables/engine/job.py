"""One training job on one rank: what `trainables.engine.train` builds, and works on."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from trainables.config import TrainConfig
from trainables.data.loader.loader import Loader
from trainables.device.device_batches import DeviceBatch
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.engine.backbone_evaluation import BackboneEvaluation
from trainables.engine.checkpoint import CheckpointState, Progress
from trainables.engine.checkpoint_writer import CheckpointWriter
from trainables.engine.epochs import Epochs
from trainables.engine.interruptions import Interruptions
from trainables.engine.job_metrics import JobMetrics
from trainables.engine.passes import TrainState
from trainables.metrics.pending_line import PendingLine
from trainables.metrics.phase_timer import PhaseTimer
from trainables.metrics.report import Report
from trainables.rundir import StageDir
from trainables.stage_result import TeacherAccuracy

TrainStep = Callable[[DeviceBatch, int, PhaseTimer], None]
"""Trains on a batch in the step of this index, see `trainables.engine.train.train_step`."""

Logits = Callable[[DeviceBatch], Tensor | None]
"""The student's for a batch of the evaluation; None where another rank has them."""


class Snapshot(Protocol):
    """Telemetry of the nodes since the last call, or (`whole`) since the job began; every rank calls it."""

    def __call__(self, whole: bool = False) -> dict[str, float]: ...


@dataclass(kw_only=True)
class Job:
    """One training job on this rank."""

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
    """Writes checkpoints, and where `report` puts its records there too, each in its order."""
    checkpoints: CheckpointWriter
    telemetry: Snapshot
    interruptions: Interruptions
    backbone_evaluation: BackboneEvaluation | None = None
    """None for a student with a classifier."""
    stop_early: Callable[[Sequence[float]], bool] | None = None
    """Whether the seconds of its steps past the warm-up are enough to end a timing run. None: it runs all its steps."""
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Ends the threads and processes of loaders, teacher and disk."""
    teachers: list[TeacherAccuracy | None] = field(default_factory=list)
    """Those with given weights, once `run_job` has measured them."""
    writes_log_late: bool = False
    """Whether a log line is written with the next one, see `log_lines`."""
    log_line: PendingLine | None = None
    """The one whose numbers are on their way."""
    logged_skips: set[tuple[Loader, int]] = field(default_factory=set)
    """Unreadable images that the log has named: the loader, and the image's index."""

    @property
    def student(self) -> nn.Module:
        """The bare student, or this rank's pipeline stage of it.

        It is trained through the module of `train_state.update`, which wraps it with its methods.
        """
        return self.train_state.distillation_module.student

    @property
    def epochs(self) -> Epochs:
        return self.train_state.epochs

    @property
    def progress(self) -> Progress:
        return self.checkpoint_state.progress

    def close(self) -> None:
        """End the threads of loaders and disk, and release what they use on this node. The job can train no more."""
        self.resources.close()
