"""A stage as its workers get it, and what they reserve."""

from dataclasses import dataclass, replace
from pathlib import Path

from service.cluster.resources import Reservation
from service.config.rules import needs_teacher
from trainables.config import TrainConfig
from trainables.rundir import StageDir


@dataclass(frozen=True)
class Assignment:
    """A stage and what it runs on."""

    config: TrainConfig
    use_gpu: bool
    loader_workers: int
    storage: str
    """Folder or URI of Ray's own files; ours are under `config.output_dir`."""
    limit_s: float | None = None
    """How long it may take on its workers; with `init` both."""
    init: "Assignment | None" = None
    """The init stage before it, which is carried out first."""

    def after(self, used_s: float) -> "Assignment":
        """What is left of it when workers have worked on it for so long."""
        return self if self.limit_s is None else replace(self, limit_s=max(self.limit_s - used_s, 0.0))

    @property
    def stage_dir(self) -> StageDir:
        return StageDir(Path(self.config.output_dir))

    @property
    def reservation(self) -> Reservation:
        return reservation_of(self.config, self.loader_workers, self.use_gpu)


def reservation_of(config: TrainConfig, loader_workers: int, use_gpu: bool) -> Reservation:
    """What a stage reserves, with the actors of `teacher.service` that compute its teacher's logits."""
    cpus_per_worker, gpus = config.scale.cpus_per_worker, int(use_gpu)
    service = None
    teacher = config.teacher
    if teacher is not None and teacher.service and config.distill is not None and needs_teacher(config.distill, ()):
        service = Reservation(teacher.service, cpus_per_worker, gpus, unit="actors")
    return Reservation(
        config.scale.num_workers, cpus_per_worker + loader_workers, gpus, service, min_workers=config.scale.min_workers
    )
