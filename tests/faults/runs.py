"""Real runs whose ranks are processes of a pool, written where a run of `distill train` is."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from service.config.experiment import load
from service.doctor.read_run import Recording, read_run
from service.runs.events import Event, event, to_line
from service.runs.run_directory import begin_run, reopen
from tests.faults.injected import FAULTS
from tests.trainables.data.photos import encoded, photo
from tests.trainables.jobs import write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.job import Job
from trainables.engine.train import build, run_job
from trainables.metrics.report import Report
from trainables.rundir import RunDir
from trainables.stage_result import StageResult
from trainables.worker.node_telemetry import node_telemetry

SIZE, CLASSES = 32, 4
STEPS, WARMUP_STEPS = 20, 4
MANY = 8
"""Names of each image in the larger folder, so that no epoch ends while trainings take turns."""


@dataclass(frozen=True)
class Training:
    """A timing run to make: `batch` images a worker; each fault adds so many seconds to a step."""

    num_workers: int
    batch: int
    faults: Mapping[str, float] = field(default_factory=dict)
    """Those that only change the settings too."""
    sets: tuple[str, ...] = ()
    """May name `{images}`, `{many_images}`, folders of one and of several names for each image, and `{digits_teacher}`."""


def make_images(folder: Path) -> Path:
    """JPEG files of a small image classification."""
    for split, count in (("train", 480), ("val", 4)):
        for label in range(CLASSES):
            class_folder = folder / split / str(label)
            class_folder.mkdir(parents=True)
            for number in range(count):
                image = encoded(photo(1000 * label + number, SIZE, SIZE), "JPEG", quality=90)
                (class_folder / f"{number}.jpg").write_bytes(image)
    return folder


def link_images(images: Path, folder: Path) -> Path:
    """The same files, each under `MANY` names."""
    for file in images.rglob("*.jpg"):
        class_folder = folder / file.parent.relative_to(images)
        class_folder.mkdir(parents=True, exist_ok=True)
        for copy in range(MANY):
            os.link(file, class_folder / f"{copy}_{file.name}")
    return folder


class Bench:
    """Runs trainings on pools of ranks, with or without faults, and gives the doctor their records. Use as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers, self._pools = folder, itertools.count(), list[RankPool]()
        images = make_images(folder / "images")
        self._named = {
            "images": str(images),
            "many_images": str(link_images(images, folder / "many")),
            "digits_teacher": write_teacher(folder / "digits_teacher.safetensors", "mlp_small", 10, 8),
        }
        self._base = [
            "data.path={images}",
            f"data.image_size={SIZE}",
            "data.augment=pad_crop_flip",
            "data.loader_workers=1",
            "student.model=resnet8",
            "teacher.model=mlp_small",
            f"teacher.weights={write_teacher(folder / 'teacher.safetensors', 'mlp_small', CLASSES, SIZE)}",
            "optim.epochs=400",
            f"train.max_steps={STEPS}",
            f"train.warmup_steps={WARMUP_STEPS}",
            "train.log_every=4",
            "train.telemetry_every_s=0.2",
            "tracking.enabled=false",
        ]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.close()

    def pool(self, number: int) -> RankPool:
        """Two ranks in processes of their own, for one of several trainings side by side."""
        while len(self._pools) <= number:
            self._pools.append(RankPool(2, fork_server=True))
        return self._pools[number]

    def run(self, training: Training) -> Recording:
        """The records of a training that runs alone, from its beginning to its end."""
        run_dir, config = self.prepare(training)
        self.pool(0).run(training.num_workers, train_rank, config, dict(training.faults))
        return self.read(run_dir, config)

    def prepare(self, training: Training) -> tuple[RunDir, TrainConfig]:
        """A run directory as it is before its student is trained, and that student's configuration."""
        overrides = [
            *self._base,
            "train.noise_scale=true",  # by whose hook `injected.slow_all_reduce` delays
            f"scale.num_workers={training.num_workers}",
            f"data.global_batch_size={training.batch * training.num_workers}",
            *training.sets,
        ]
        resolved = load("digits", [one.format(**self._named) for one in overrides])
        run_dir = RunDir(self._folder / f"run{next(self._numbers)}")
        run_dir.root.mkdir()
        begin_run(resolved, "train", run_dir, self._folder)
        return run_dir, resolved.experiment.stage("student", run_dir.stage("student").root, {})

    def read(self, run_dir: RunDir, config: TrainConfig) -> Recording:
        """What the doctor reads of a training that has ended."""
        changes = {
            "use_gpu": False,
            "num_workers": config.scale.num_workers,
            "loader_workers": config.data.loader_workers,
        }
        append(run_dir, event("result", changes=changes))
        append(run_dir, event("session_ended", status="complete", reason=""))
        return read_run(*reopen(run_dir.root))[0]


def train_rank(group: Group, config: TrainConfig, faults: Mapping[str, float]) -> None:
    """What `trainables.worker.entry_points.train_loop_per_worker` does, without Ray."""
    with (
        node_telemetry(config.train.telemetry_every_s, group) as telemetry,
        contextlib.closing(build(config, group, file_report(config, group), telemetry)) as job,
        injected(job, faults),
    ):
        write_summary(job, run_job(job))


def append(run_dir: RunDir, made: Event) -> None:
    """Append to the run's log, without a wait for the disk, which the recorder's process has."""
    with open(run_dir.events, "ab") as file:
        file.write(to_line(made))


def file_report(config: TrainConfig, group: Group) -> Report:
    """Appends the stage's numbers to its run's log, but for the summary."""
    folder = Path(config.output_dir)

    def report(kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        if group.is_main and kind != "summary":
            append(RunDir(folder.parent), event(kind, folder.name, step=step, epoch=epoch, metrics=metrics))

    return report


def write_summary(job: Job, summary: Mapping[str, float]) -> None:
    """The end of the stage, as the worker records it."""
    if job.group.is_main:
        folder, result = Path(job.config.output_dir), StageResult(model=job.config.model, metrics=dict(summary))
        where = {"step": int(summary["steps"]), "epoch": 0.0}
        append(RunDir(folder.parent), event("summary", folder.name, **where, **result.model_dump()))


@contextlib.contextmanager
def injected(job: Job, faults: Mapping[str, float]) -> Iterator[None]:
    """The faults in a job that is built; those that are settings are in it already."""
    with contextlib.ExitStack() as stack:
        for fault, extra_s in faults.items():
            if fault in FAULTS:
                stack.callback(FAULTS[fault](job, extra_s))
        yield
