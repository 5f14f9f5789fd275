"""`export` and `bench-model`: a student as other programs read it, and how fast it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from service.commands.options import DATA_PATH, FileOrUri, PathType, print_all
from service.config.experiment import read_resolved
from service.config.paths import absolute
from service.runs.stored.stored_runs import fetch_records, find_checkpoint
from trainables.config import DataConfig
from trainables.errors import CheckpointError, ExportError
from trainables.export import NAMES
from trainables.models.names import check_model_name, library_of
from trainables.object_store.store import is_uri
from trainables.rundir import RunDir, write_json

if TYPE_CHECKING:
    from trainables.export.student import Student


@click.command()
@click.argument("checkpoint", metavar="RUN|CHECKPOINT", type=FileOrUri())
@click.option("--to", type=click.Choice(NAMES), required=True, help="The format.")
@click.option(
    "--out",
    type=PathType(),
    help="Folder of the file and of export.json; default: exports/FORMAT in the run, or exports/STAGE-CHECKPOINT/FORMAT.",
)
@click.option("--data", "data_path", type=FileOrUri(), help=f"Validation images to compare on; default: the run's. {DATA_PATH}")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="Most validation images to compare on.")
@click.option("--preprocess", is_flag=True, help="onnx, torch_export: take uint8 (B, 3, H, W), and normalize them inside.")
@click.option(
    "--tolerance", type=click.FloatRange(0), default=1e-3, show_default=True, help="Largest difference, of the largest logit."
)
def export(checkpoint: str, to: str, out: Path | None, data_path: str | None, **options: Any) -> None:
    """A trained student for other programs: ONNX, torch.export, timm, torchvision, safetensors.

    Each file is read back by the library that other programs read it with, and compared with the checkpoint on validation images.

    \b
    Example:  distill export runs/digits-1 --to onnx --preprocess
    """
    path = find_checkpoint(checkpoint)
    if path is None:
        raise CheckpointError(f"{checkpoint} is the name of published weights: give a run or a checkpoint")
    from trainables.export.student import read_student

    student, run = read_student(path), run_of(path)
    if out is None and (run is None or is_uri(checkpoint)):
        raise ExportError(f"{checkpoint} is in no run's folder on this machine: write --out FOLDER")
    if run is None and data_path is None:
        raise ExportError(f"{checkpoint} is in no run, whose validation images it would be compared on: write --data PATH")
    data = read_resolved(RunDir(run).experiment, reading=True).experiment.data if run is not None else DataConfig()
    if data_path is not None:
        data = data.model_copy(update={"path": absolute(data_path)})
    from trainables.export.export import export as write

    folder = out if run is None or out is not None else exports_of(run, path) / to
    assert folder is not None
    print_all(lines_of(write(student, to, folder, data, **options), folder))


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run, or of the trial, that has a checkpoint."""
    for folder in checkpoint.absolute().parents[:4]:
        fetch_records(folder)
        if RunDir(folder).experiment.is_file():
            return folder
    return None


def exports_of(run: Path, checkpoint: Path) -> Path:
    """Return a run's folder for the exports of a checkpoint: `exports` for the student's best, else a folder in it."""
    stage, name = checkpoint.absolute().parents[1].name, checkpoint.stem
    return run / "exports" if (stage, name) == ("student", "best") else run / "exports" / f"{stage}-{name}"


def lines_of(record: dict[str, Any], folder: Path) -> list[str]:
    """What is printed of an export."""
    found, file = record["comparison"], folder / record["file"]
    opset = f", opset {record['opset']}" if "opset" in record else ""
    skipped = f" ({found['skipped_images']} unreadable)" if found["skipped_images"] else ""
    accuracy = f"; Acc@1 {found['top1_pct']:.3f} (checkpoint {found['checkpoint_top1_pct']:.3f})" if "top1_pct" in found else ""
    same = f", equal top-1 {found['same_top1_pct']:.2f}%" if "same_top1_pct" in found else ""
    return [
        f"{file}: {record['model']}{opset}, {file.stat().st_size / 2**20:.2f} MiB; classes and preprocessing: export.json",
        f"read back and compared on {found['num_images']:,} of {found['num_val_images']:,} validation images of {found['data']}"
        f"{skipped}: largest difference of {record['output']} {found['max_difference']:.3g} (allowed {found['tolerance']:.3g})"
        f"{same}{accuracy}",
        f"images: numpy {record['input']}; mean {record['mean']}, std {record['std']}, {record['image_size']} px",
        "load it with:",
        *(f"  {line}" for line in record["load"]),
    ]


@click.command("bench-model")
@click.argument("model", metavar="MODEL|RUN|CHECKPOINT|FILE.onnx", type=FileOrUri())
@click.option("--batch", "batches", default="1,32", show_default=True, help="Batch sizes, separated by commas.")
@click.option("--threads", "num_threads", type=click.IntRange(1), help="Threads of torch and onnxruntime; default: torch's.")
@click.option("--image-size", type=click.IntRange(1, 4096), help="Pixels a side; default: the model's own.")
@click.option("--compile", "compiled", is_flag=True, help="A row for torch.compile, too.")
@click.option("--json", "json_file", type=PathType(dir_okay=False), help="Write the numbers to this file, too.")
def bench_model(
    model: str, batches: str, num_threads: int | None, image_size: int | None, compiled: bool, json_file: Path | None
) -> None:
    """Latency, throughput, parameters and MACs of a model on this machine's CPU.

    In torch, and in onnxruntime where that is installed. A model that is given by its name has random weights.

    \b
    Example:  distill bench-model mobilenet_v3_small --batch 1 --threads 1
    """
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", batches):
        raise click.UsageError(f"--batch {batches}: write whole numbers from 1, such as 1,32")
    sizes, is_file = [int(size) for size in batches.split(",")], not is_uri(model) and Path(model).suffix == ".onnx"
    if not is_file and not is_uri(model) and not Path(model).exists():
        check_model_name(model)
    import torch

    from trainables.export.bench import bench, bench_file

    torch.set_num_threads(num_threads or torch.get_num_threads())
    if is_file:
        if not Path(model).is_file():
            raise ExportError(f"there is no file {model}: give an ONNX file, a run, a checkpoint or a model's name")
        found = bench_file(Path(model), sizes, image_size=image_size)
    else:
        found = bench(benched(model, image_size), sizes, image_size=image_size, compiled=compiled)
    if json_file is not None:
        write_json(json_file, found)
    macs = f", {found['macs'] / 1e6:,.2f} M MACs an image (FLOPs / 2)" if found["macs"] is not None else ""
    table = Table("runtime", "batch", "median ms", "p95 ms", "images/s")
    for row in found["rows"]:
        speed = (f"{row['median_ms']:.2f}", f"{row['p95_ms']:.2f}", f"{row['images_per_s']:,.0f}")
        table.add_row(row["runtime"], str(row["batch"]), *speed)
    line = (
        f"{found['model']}: {found['num_parameters'] / 1e6:,.2f} M parameters{macs}, {found['size_mib']:.2f} MiB;"
        f" {found['image_size']} px, float32 on the CPU, {found['num_threads']} thread{'s' if found['num_threads'] > 1 else ''}"
    )
    print_all([line, table])


def benched(model: str, image_size: int | None) -> Student:
    """The student of a run or a checkpoint, or a model of this name with random parameters and 1,000 classes."""
    from trainables.export.student import Student, read_student
    from trainables.models.model_input import ModelInput
    from trainables.models.registry import build_model

    path = find_checkpoint(model) if is_uri(model) or Path(model).exists() else None
    if path is not None:
        return read_student(path)
    library, name = library_of(model)
    size = image_size or library.default_size(name) or 224
    module = build_model(model, num_classes=1000, image_size=size, seed=0).eval().requires_grad_(False)
    return Student(module, model, ModelInput(size, (0.5,) * 3, (0.5,) * 3), None, tuple(map(str, range(1000))))
