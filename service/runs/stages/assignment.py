"""The assignment that a stage's workers get, and the resources that they reserve."""

from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cluster.resources import Reservation
from service.config.rules import needs_teacher
from trainables.config import TrainConfig
from trainables.config.job import StepPart
from trainables.redact import redact
from trainables.rundir import StageDir

if TYPE_CHECKING:
    from trainables.worker.recorder import RunRecorder


@dataclass(frozen=True)
class Assignment:
    """A stage's configuration and the resources that it runs on."""

    config: TrainConfig
    use_gpu: bool
    loader_workers: int
    storage: str
    """Folder or URI for Ray's files; the stage's own files are under `config.output_dir`."""
    limit_s: float | None = None
    """Time limit for the workers, together with those of `init`."""
    init: "Assignment | None" = None
    """The init stage, which runs first."""
    recorder: "RunRecorder | None" = field(default=None, compare=False)
    """The run's log, set by `recorded_by` when the stage is about to run."""

    def recorded_by(self, recorder: "RunRecorder", limit_s: float | None = None) -> "Assignment":
        """Return a copy, ready to run, that records to `recorder`, as does its init stage."""
        init = None if self.init is None else self.init.recorded_by(recorder, limit_s)
        return replace(self, init=init, recorder=recorder, limit_s=limit_s)

    def without(self, part: StepPart) -> "Assignment":
        """Return the stage under another name, without a part of its steps and without its init stage."""
        other = self.named(f"{self.config.stage}-without-{part}")
        return replace(other, config=other.config.model_copy(update={"omitted": part}), init=None)

    def named(self, name: str) -> "Assignment":
        """Return the stage under another name, in a folder of that name."""
        output_dir = str(self.stage_dir.root.with_name(name))
        return replace(self, config=self.config.model_copy(update={"stage": name, "output_dir": output_dir}))

    @property
    def log(self) -> "RunRecorder":
        assert self.recorder is not None
        return self.recorder

    @property
    def name(self) -> str:
        """The stage's name in the log."""
        return self.log.stage(self.stage_dir.root)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The stage's events in the log."""
        return self.log.of(self.name)

    def append_to_log(self, line: str) -> None:
        """Append a line to the stage's `logs/train.log`."""
        self.log.text(self.stage_dir.log, f"{datetime.now():%H:%M:%S} {redact(line)}\n")

    def after(self, used_s: float) -> "Assignment":
        """Return a copy with its time limit reduced by `used_s`."""
        return self if self.limit_s is None else replace(self, limit_s=max(self.limit_s - used_s, 0.0))

    @property
    def can_follow_others(self) -> bool:
        """Whether workers that have run other stages can go on with this one.

        Timing runs can. A training cannot if it needs an attempt of its own: for an init stage, for another number of workers
        (elastic), or to begin from a checkpoint in an object store.
        """
        config = self.config
        if config.train.max_steps is not None:
            return True
        return self.init is None and config.scale.min_workers is None and config.run_store is None

    @property
    def stage_dir(self) -> StageDir:
        return StageDir(Path(self.config.output_dir))

    @property
    def reservation(self) -> Reservation:
        return reservation_of(self.config, self.loader_workers, self.use_gpu)


def reservation_of(config: TrainConfig, loader_workers: int, use_gpu: bool) -> Reservation:
    """Return a stage's reservation, including the `teacher.service` actors that compute its teacher's logits."""
    cpus_per_worker, gpus = config.scale.cpus_per_worker, int(use_gpu)
    service = None
    teacher = config.teacher
    if teacher is not None and teacher.service and config.distill is not None and needs_teacher(config.distill, ()):
        service = Reservation(teacher.service, cpus_per_worker, gpus, unit="actors")
    return Reservation(
        config.scale.num_workers, cpus_per_worker + loader_workers, gpus, service, min_workers=config.scale.min_workers
    )
