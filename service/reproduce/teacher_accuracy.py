"""The accuracy of a teacher here, and the hash of its weights."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from service.config.schema import Experiment
from service.runs.run_log import read_log
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.rundir import RunDir, write_json

MEASURED = "teacher-given.json"
"""In a sweep's folder: the accuracy of a teacher whose weights were given."""


@dataclass(frozen=True)
class TeacherAccuracy:
    """The accuracy of a teacher of students."""

    top1_pct: float
    sha256: str
    """Of the tensors, see `teacher_sha256`: the same in whatever file they are, and for weights that have a name."""
    weights: str


def measure_teacher(experiment: Experiment, run_dir: RunDir, root: Path) -> TeacherAccuracy:
    """The accuracy of a teacher with given weights. It is measured once and written to the sweep's folder.

    Raises DistillError: the weights or the data cannot be read.
    """
    file = run_dir.root / MEASURED
    if file.exists():
        return TeacherAccuracy(**json.loads(file.read_text()))
    from service.runs.evaluate import evaluate
    from trainables.data.source import open_source
    from trainables.engine.checkpoint import write_tensors
    from trainables.models.model_input import teacher_input
    from trainables.models.weights import load_teacher, teacher_sha256

    teacher, data = experiment.teacher, experiment.data
    assert teacher is not None
    assert teacher.weights is not None
    classes, given = open_source(data, "val").classes, teacher_input(teacher, data)
    fit: dict[str, Any] = {"image_size": given.image_size, "classes": classes, "seed": 0}
    fit["weights_key"] = teacher.weights_key
    model = load_teacher(teacher.model, teacher.weights, **fit)
    header = {
        "model": teacher.model,
        "num_classes": len(classes),
        "classes": list(classes),
        "image_size": given.image_size,
        "val_resize": data.val_resize,
        "mean": list(given.mean),
        "std": list(given.std),
        "transform_input": bool(getattr(model, "transform_input", False)),
    }
    checkpoint = run_dir.root / "given-teacher.safetensors"
    write_tensors(checkpoint, {f"model.{name}": tensor for name, tensor in model.state_dict().items()}, header)
    settings = [f"data.loader_workers={data.loader_workers}", f"scale.use_gpu={str(experiment.scale.use_gpu).lower()}"]
    top1_pct = evaluate(str(checkpoint), data.path, settings, root)["top1_pct"]
    accuracy = TeacherAccuracy(top1_pct, teacher_sha256(teacher.model, teacher.weights, **fit), teacher.weights)
    checkpoint.unlink()
    write_json(file, asdict(accuracy))
    return accuracy


def teacher_accuracy(experiment: Experiment, run_dir: RunDir) -> TeacherAccuracy | None:
    """What an earlier call has measured or trained; nothing is measured here."""
    if experiment.teacher is None:
        return None
    file = run_dir.root / MEASURED
    return TeacherAccuracy(**json.loads(file.read_text())) if file.exists() else trained_teacher(run_dir)


def trained_teacher(run_dir: RunDir) -> TeacherAccuracy | None:
    """The teacher that a sweep has trained, at its best epoch, which the students learn from; None: it has trained none yet."""
    stage = run_dir.stage("teacher")
    events = read_log(run_dir).of_stage("teacher", "summary") if run_dir.events.exists() else []
    header = read_checkpoint_header(stage.best) if stage.best.exists() else None
    if header is None or not events:
        return None
    from trainables.models.weights import teacher_sha256

    fit: dict[str, Any] = {"image_size": header.image_size, "classes": header.classes}
    sha256 = teacher_sha256(header.model, str(stage.best), **fit, seed=0)
    return TeacherAccuracy(events[-1]["metrics"]["best_top1_pct"], sha256, str(stage.best))
