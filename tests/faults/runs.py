"""Real runs whose ranks are processes of a pool, written where a run of `distill train` is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.config.experiment import load
from service.doctor.read_run import Case, read_run
from service.runs.run_directory import begin, reopen
from tests.faults.injected import FAULTS
from tests.trainables.data.photos import encoded, photo
from tests.trainables.jobs import write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import loop
from trainables.engine.job import build
from trainables.rundir import RunDir, StageDir, write_json
from trainables.stage_result import StageResult, write_stage_result

SIZE, CLASSES = 32, 4


def make_data(folder: Path) -> Path:
    """JPEG files of a small image classification."""
    for split, count in (("train", 480), ("val", 4)):
        for label in range(CLASSES):
            class_folder = folder / split / str(label)
            class_folder.mkdir(parents=True)
            for number in range(count):
                (class_folder / f"{number}.jpg").write_bytes(
                    encoded(photo(1000 * label + number, SIZE, SIZE), "JPEG", quality=90)
                )
    return folder


class Bench:
    """Runs an experiment on a pool of ranks, with or without a fault, and gives the doctor its records."""

    def __init__(self, ranks: RankPool, folder: Path, steps: int = 20) -> None:
        self._ranks, self._folder, self._serial = ranks, folder, 0
        self._digits_teacher = write_teacher(folder / "digits_teacher.safetensors", "mlp_small", 10, 8)
        self._base = [
            f"data.path={make_data(folder / 'images')}",
            f"data.image_size={SIZE}",
            "data.augment=pad_crop_flip",
            "data.loader_workers=1",
            "student.model=resnet8",
            "teacher.model=mlp_small",
            f"teacher.weights={write_teacher(folder / 'teacher.safetensors', 'mlp_small', CLASSES, SIZE)}",
            "optim.epochs=40",
            f"train.max_steps={steps}",
            "train.warmup_steps=4",
            "train.log_every=4",
            "train.telemetry_every_s=0.2",
            "tracking.enabled=false",
        ]

    def run(self, num_workers: int, batch: int, faults: Mapping[str, float] | None = None, sets: Sequence[str] = ()) -> Case:
        """`batch` images a worker; each fault adds so many seconds to a step, if it is one that is put in from outside.

        `sets` may name `{digits_teacher}`, a teacher of the ten digits.
        """
        self._serial += 1
        overrides = [
            *self._base,
            f"scale.num_workers={num_workers}",
            f"data.global_batch_size={batch * num_workers}",
            *(one.format(digits_teacher=self._digits_teacher) for one in sets),
        ]
        resolved = load("digits", overrides)
        run_dir = RunDir(self._folder / f"run{self._serial}")
        run_dir.root.mkdir()
        begin(resolved, "train", run_dir, self._folder)
        config = resolved.experiment.stage("student", run_dir.stage("student").root, {})
        self._ranks.run(num_workers, train_rank, config, dict(faults or {}))
        summary = json.loads(run_dir.stage("student").result.read_text())
        result = json.loads(run_dir.result.read_text())
        stage = {"stage": "student", "model": config.model, "status": "ok", "reason": "", "restarts": 0, "checkpoint": None}
        loader = {"use_gpu": False, "num_workers": num_workers, "loader_workers": config.data.loader_workers}
        write_json(
            run_dir.result, {**result, **loader, "stages": [{**stage, "metrics": summary["metrics"]}], "status": "complete"}
        )
        return read_run(*reopen(run_dir.root))[0]

    def ms_per_image(self, case: Case) -> float:
        """As a user would measure it: wall time over images."""
        return (case.evidence.typical.step_ms + case.evidence.outside_ms) / case.evidence.global_batch


def train_rank(group: Group, config: TrainConfig, faults: Mapping[str, float]) -> None:
    """What `trainables.worker.entry_points.train_loop_per_worker` does, without Ray."""
    from trainables.worker.node_telemetry import NodeTelemetry

    stage = StageDir(Path(config.output_dir))
    stage.root.mkdir(exist_ok=True)

    def report(kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        if group.is_main:
            line: dict[str, Any] = {"kind": kind, "stage": config.stage, "step": step, "epoch": epoch, "time_ms": 0}
            with open(stage.metrics, "a") as file:  # without a wait for the disk, which the worker leaves to a thread
                file.write(json.dumps({**line, "metrics": metrics}) + "\n")

    with NodeTelemetry(config, group) as telemetry, contextlib.closing(build(config, group, report, telemetry.snapshot)) as job:
        undone = [FAULTS[fault](job, extra_s) for fault, extra_s in faults.items() if fault in FAULTS]
        try:
            summary = loop.run(job)
        finally:
            for undo in undone:
                undo()
    if group.is_main:
        write_stage_result(stage, StageResult(stage=config.stage, model=config.model, metrics=summary))
