"""The work that `loop` and `memory` do on both sides: a teacher, a student and a number of steps, on noise or on JPEG files."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.process import answer_of
from trainables.config import TrainConfig
from trainables.data.index import read_index
from trainables.engine.checkpoint import write_tensors
from trainables.engine.job import Job
from trainables.engine.train import train_epoch
from trainables.models.registry import build_model
from trainables.rundir import StageDir
from trainables.worker import trainer

NUM_CLASSES = 10
LABELS = tuple(str(label) for label in range(NUM_CLASSES))
LOG_EVERY = 20
EPOCH_STEPS = 200
"""Both sides come to the ends of epochs in the middle of what is timed."""


def train_on(job: Job, steps: int) -> None:
    """So many steps more, as a timing run takes them."""
    progress = job.progress
    last = progress.step + steps
    while progress.step < last:
        train_epoch(job, stop_at=last)
        if progress.position >= job.train_loader.samples_per_epoch:
            progress.epoch, progress.position = progress.epoch + 1, 0


@dataclass(frozen=True)
class Pair:
    """A distillation of `student` from `teacher`."""

    teacher: str
    student: str
    image_size: int
    global_batch_size: int
    warmup_steps: int
    steps: int
    images: Path | None = None
    """Holds train/CLASS/*.jpg, which the plain script reads; None: noise for both sides."""
    packed: Path | None = None
    """The same images as a packed set, which ours reads."""

    def config(self, folder: Path, num_workers: int, classes: Sequence[str] = LABELS) -> TrainConfig:
        """What our workers are told. The teacher's weights, which change nothing about the time, are the initial ones."""
        weights = folder / f"{self.teacher}.safetensors"
        if not weights.exists():
            model = build_model(self.teacher, num_classes=NUM_CLASSES, image_size=self.image_size, seed=0)
            about = {"model": self.teacher, "num_classes": NUM_CLASSES, "image_size": self.image_size, "classes": list(classes)}
            write_tensors(weights, {f"model.{name}": value for name, value in model.state_dict().items()}, about)
        tree: dict[str, Any] = {
            "output_dir": tempfile.mkdtemp(dir=folder),
            "model": self.student,
            "teacher": {"model": self.teacher, "weights": str(weights)},
            "data": {
                "path": "synthetic",
                "image_size": self.image_size,
                "global_batch_size": self.global_batch_size,
                "loader_workers": 1,
                "synthetic_images": EPOCH_STEPS * self.global_batch_size,
                "synthetic_classes": NUM_CLASSES,
            },
            "scale": {"num_workers": num_workers, "use_gpu": False},
            "train": {"warmup_steps": self.warmup_steps, "max_steps": self.steps, "log_every": LOG_EVERY},
        }
        if self.packed:
            tree["data"] |= {"path": str(self.packed), "augment": "pad_crop_flip"}
        return TrainConfig.model_validate(tree)

    def ours(self, folder: Path, num_workers: int) -> dict[str, float]:
        """The summary of a timing run in a `TorchTrainer`, on the Ray that this process is connected to."""
        config = self.config(folder, num_workers, read_index(self.packed).classes if self.packed else LABELS)
        trainer.fit(config, use_gpu=False, loader_workers=1, storage=str(folder / "ray"), name=Path(config.output_dir).name)
        summary: dict[str, float] = json.loads(StageDir(Path(config.output_dir)).result.read_text())["metrics"]
        return summary

    def plain(self, num_workers: int, **variables: str) -> dict[str, float]:
        """`images_per_s` of the plain script, and `peak_mib`, `pss_mib` and `empty_mib` (before its work) of its rank 0.

        `variables`: more of its environment.
        """
        options: dict[str, Any] = {
            "teacher": self.teacher,
            "student": self.student,
            "size": self.image_size,
            "batch": self.global_batch_size,
            "classes": NUM_CLASSES,
            "images": EPOCH_STEPS * self.global_batch_size,
            "warmup": self.warmup_steps,
            "steps": self.steps,
            "log-every": LOG_EVERY,
        }
        if self.images:
            options["folder"] = self.images
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}"]
        return answer_of([*launch, "-m", "tests.benchmarks.plain", *words], **variables)
