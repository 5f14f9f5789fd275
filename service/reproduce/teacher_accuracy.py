"""What is known of a teacher: its accuracy here and the hash of its weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from service.config.experiment import Experiment
from service.runs.outcome import read_summary
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.rundir import RunDir, write_json

KEPT = "teacher-given.json"


@dataclass(frozen=True)
class Known:
    """A teacher as it taught."""

    top1_pct: float
    sha256: str
    """Of the tensors, see `teacher_sha256`: the same whatever file they lie in, and of weights that go by a name."""
    weights: str


def trained(run_dir: RunDir) -> Known | None:
    """The teacher that a sweep has trained: its best epoch, which teaches. None: not yet."""
    stage = run_dir.stage("teacher")
    summary = read_summary(stage)
    header = read_checkpoint_header(stage.best) if stage.best.exists() else None
    if header is None or summary is None:
        return None
    from trainables.models.weights import teacher_sha256

    about: dict[str, Any] = {"num_classes": header.num_classes, "image_size": header.image_size, "classes": header.classes}
    sha256 = teacher_sha256(header.model, str(stage.best), **about, seed=0)
    return Known(summary.metrics["best_top1_pct"], sha256, str(stage.best))


def measured(experiment: Experiment, run_dir: RunDir, root: Path) -> Known:
    """The accuracy of a teacher with weights of its own, once: it is kept beside its sweep, and not measured again.

    Raises:
        DistillError: the weights or the data cannot be read; one line.
    """
    kept = run_dir.root / KEPT
    if kept.exists():
        return Known(**json.loads(kept.read_text()))
    from service.runs.evaluate import evaluate
    from trainables.data.source import open_source
    from trainables.engine.checkpoint import write_tensors
    from trainables.models.weights import load_teacher, teacher_sha256

    teacher, data = experiment.teacher, experiment.data
    assert teacher is not None
    assert teacher.weights is not None
    classes, size = open_source(data, "val").classes, data.image_size
    told: dict[str, Any] = {"num_classes": len(classes), "image_size": size, "classes": classes, "seed": 0}
    model = load_teacher(teacher.model, teacher.weights, **told)
    about = {
        "model": teacher.model,
        "num_classes": len(classes),
        "classes": list(classes),
        "image_size": size,
        "val_resize": data.val_resize,
        "mean": list(data.mean),
        "std": list(data.std),
        "transform_input": bool(getattr(model, "transform_input", False)),
    }
    ours = run_dir.root / "given-teacher.safetensors"
    write_tensors(ours, {f"model.{name}": tensor for name, tensor in model.state_dict().items()}, about)
    settings = [f"data.loader_workers={data.loader_workers}", f"scale.use_gpu={str(experiment.scale.use_gpu).lower()}"]
    top1_pct = evaluate(ours, data.path, settings, root)["top1_pct"]
    known = Known(top1_pct, teacher_sha256(teacher.model, teacher.weights, **told), teacher.weights)
    ours.unlink()
    write_json(kept, asdict(known))
    return known


def known_of(experiment: Experiment, run_dir: RunDir) -> Known | None:
    """What an earlier call has found out, without measuring anything."""
    if experiment.teacher is None:
        return None
    kept = run_dir.root / KEPT
    return Known(**json.loads(kept.read_text())) if kept.exists() else trained(run_dir)
