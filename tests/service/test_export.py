"""`distill export` and `distill bench-model`: what is printed, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.service.commands import run
from tests.trainables.export.students import write_student

RECIPE = Path(__file__).parents[2] / "service/recipes/digits.yaml"


def run_of(folder: Path, model: str = "mlp_small") -> Path:
    """A run on the digits, with an untrained student."""
    path = folder / "run/student/checkpoints/best.safetensors"
    path.parent.mkdir(parents=True)
    write_student(path, model)
    shutil.copy(RECIPE, folder / "run/experiment.yaml")
    return folder / "run"


def test_an_export_of_a_run_goes_into_its_folder_and_prints_how_to_load_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_of(tmp_path)
    code, out, _ = run(capsys, "export", directory, "--to", "torch_export", "--limit", "60")
    assert code == 0
    file = directory / "exports/torch_export/model.pt2"
    record = json.loads((file.parent / "export.json").read_text())
    found = record["comparison"]
    assert out.splitlines()[0].startswith(f"{file}: mlp_small, 0.")
    assert (
        f"on {found['num_images']} of {found['num_val_images']} validation images of digits: largest difference of logits" in out
    )
    assert f"equal top-1 100.00%; Acc@1 {found['top1_pct']:.3f} (checkpoint {found['top1_pct']:.3f})" in out
    assert [line.strip() for line in out.splitlines()[-3:]] == record["load"]
    checkpoint = directory / "student/checkpoints/best.safetensors"
    code, out, _ = run(capsys, "export", checkpoint, "--to", "safetensors", "--out", tmp_path / "x", "--limit", "60")
    assert code == 0
    assert (tmp_path / "x/model.safetensors").is_file()


def test_an_export_of_another_checkpoint_of_a_run_does_not_replace_the_students(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_of(tmp_path)
    for other in ("teacher/checkpoints/best", "student/checkpoints/last"):
        (directory / other).parent.mkdir(parents=True, exist_ok=True)
        write_student(directory / f"{other}.safetensors", "mlp_large")
    for named in (directory, directory / "teacher", directory / "student/checkpoints/last.safetensors"):
        assert run(capsys, "export", named, "--to", "safetensors", "--limit", "8")[0] == 0
    files = sorted(directory.glob("exports/**/export.json"))
    assert {str(file.relative_to(directory / "exports").parent): json.loads(file.read_text())["model"] for file in files} == {
        "safetensors": "mlp_small",
        "teacher-best/safetensors": "mlp_large",
        "student-last/safetensors": "mlp_large",
    }


def test_what_cannot_be_exported_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lone, foreign = write_student(tmp_path / "m.safetensors", "mlp_small"), tmp_path / "foreign.pth"
    torch.save({"fc.weight": torch.zeros(3, 2)}, foreign)
    for words, says in [
        ((lone, "--to", "onnx"), "m.safetensors is in no run's folder on this machine: write --out FOLDER"),
        ((lone, "--to", "onnx", "--out", tmp_path / "x"), "whose validation images it would be compared on: write --data PATH"),
        ((tmp_path, "--to", "onnx"), "give a finished run's or stage's directory"),
        (("resnet18", "--to", "onnx"), "resnet18 is the name of published weights: give a run or a checkpoint"),
        (
            (foreign, "--to", "onnx"),
            "foreign.pth does not describe its model: give a run, or a checkpoint that `distill train` wrote",
        ),
        ((lone, "--to", "timm", "--out", tmp_path / "x", "--data", "digits"), "choose --to safetensors or onnx"),
    ]:
        code, out, error = run(capsys, "export", *words)
        assert (code, out) == (2, "")
        assert says in error
        assert len([line for line in error.splitlines() if not line.startswith("note: ")]) == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_benchmark_has_a_row_for_each_runtime_and_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, numbers = run_of(tmp_path, "resnet8"), tmp_path / "numbers.json"
    code, out, _ = run(capsys, "bench-model", directory, "--batch", "1,3", "--threads", "1", "--json", numbers)
    assert code == 0
    assert "resnet8: 0.08 M parameters, 0.78 M MACs an image (FLOPs / 2), 0.30 MiB; 8 px, float32 on the CPU, 1 thread" in out
    found = json.loads(numbers.read_text())
    assert [(row["runtime"], row["batch"]) for row in found["rows"]] == [
        *(("torch eager", 1), ("torch eager", 3)),
        *(("onnxruntime", 1), ("onnxruntime", 3)),
    ]
    assert all(0 < row["median_ms"] <= row["p95_ms"] for row in found["rows"])
    assert run(capsys, "export", directory, "--to", "onnx", "--limit", "8")[0] == 0
    file = directory / "exports/onnx/model.onnx"
    code, out, _ = run(capsys, "bench-model", file, "--batch", "2", "--json", numbers)
    assert code == 0
    of_file = json.loads(numbers.read_text())
    assert (of_file["image_size"], [row["batch"] for row in of_file["rows"]]) == (8, [2])


def test_what_cannot_be_timed_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "damaged.onnx").write_bytes(b"no")
    for words, says in [
        (("resnet18", "--batch", "1,x"), "--batch 1,x: write whole numbers from 1, such as 1,32"),
        (("resnet188",), "there is no model 'resnet188'; did you mean resnet18"),
        ((tmp_path / "missing.onnx",), "there is no file"),
        ((tmp_path / "damaged.onnx",), "damaged.onnx is not an ONNX model of images (B, C, H, W)"),
    ]:
        code, _, error = run(capsys, "bench-model", *words)
        assert code == 2
        assert says in error
