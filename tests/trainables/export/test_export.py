"""Each format is read back by its own library, and computes what the checkpoint does."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image

from tests.trainables.export.students import export_digits, write_student
from trainables.config import DataConfig
from trainables.errors import ExportError
from trainables.export.export import export
from trainables.export.formats import crop_pct
from trainables.export.student import read_student
from trainables.notices import notices_to

VIT = "timm/vit_tiny_patch16_224(depth=1)"
CASES = [
    (VIT, 32, "onnx"),
    ("resnet8", 8, "torch_export"),
    ("timm/convnext_atto", 32, "torch_export"),
    (VIT, 32, "timm"),
    ("timm/convnext_atto", 32, "timm"),
    ("resnet18", 32, "torchvision"),
    ("googlenet", 32, "torchvision"),
    (VIT, 32, "safetensors"),
    ("mobilenet_v3_small", 32, "safetensors"),
    ("resnet8", 8, "safetensors"),
]


@pytest.mark.parametrize(("model", "size", "to"), CASES)
def test_what_is_read_back_computes_what_the_checkpoint_does(tmp_path: Path, model: str, size: int, to: str) -> None:
    record = export_digits(write_student(tmp_path / "m.safetensors", model, image_size=size), to, tmp_path / "out")
    found = record["comparison"]
    assert found["same_top1_pct"] == 100
    assert found["top1_pct"] == found["checkpoint_top1_pct"]
    assert found["max_difference"] <= found["tolerance"]
    assert found["max_output"] > 0
    assert json.loads((tmp_path / "out/export.json").read_text()) == record
    assert record["classes"] == list("0123456789")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors", "out"]


BACKBONES = [("timm/convnext_atto", "timm"), ("resnet18", "torchvision"), ("resnet8", "torch_export")]


@pytest.mark.parametrize(("model", "to"), BACKBONES)
def test_the_features_of_a_backbone_are_compared(tmp_path: Path, model: str, to: str) -> None:
    record = export_digits(write_student(tmp_path / "m.safetensors", model, image_size=32, classes=()), to, tmp_path / "out")
    assert record["output"] == "features"
    assert record["classes"] == []
    assert record["comparison"].keys() >= {"max_difference", "max_output"}
    assert not record["comparison"].keys() & {"top1_pct", "same_top1_pct"}


def test_a_backbone_whose_output_passes_untrained_layers_is_a_notice(tmp_path: Path) -> None:
    for model, has_more in (("mobilenet_v3_small", True), ("resnet8", False)):
        lines: list[str] = []
        with notices_to(lines.append):
            export_digits(
                write_student(tmp_path / "m.safetensors", model, image_size=32, classes=()), "safetensors", tmp_path / model
            )
        assert any("layers after its tap `embedding`" in line for line in lines) == has_more


@pytest.mark.processes
def test_the_printed_lines_load_an_export_where_this_package_cannot_be_imported(tmp_path: Path) -> None:
    vit = write_student(tmp_path / "vit.safetensors", VIT, image_size=32)
    squeezenet = write_student(tmp_path / "squeezenet.safetensors", "squeezenet1_1", image_size=32)
    images = np.random.default_rng(0).normal(size=(3, 3, 32, 32)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    code = ["import sys", "sys.modules['trainables'] = sys.modules['service'] = None", "import numpy"]
    for name, path in {
        "onnx": squeezenet,
        "torch_export": vit,
        "torchvision": squeezenet,
        "timm": vit,
        "safetensors": vit,
    }.items():
        record = export_digits(path, name, tmp_path / name, limit=8)
        code += [f"images = numpy.load({str(tmp_path / 'images.npy')!r})", *record["load"]]
        code += [f"output = getattr(output, 'detach', lambda: output)()\nnumpy.save({str(tmp_path / name)!r}, output)"]
    subprocess.run([sys.executable, "-c", "\n".join(code)], check=True, capture_output=True, cwd=tmp_path)
    for path, names in ((squeezenet, ("onnx", "torchvision")), (vit, ("torch_export", "timm", "safetensors"))):
        expected = read_student(path).module(torch.from_numpy(images)).numpy()
        for name in names:
            assert np.allclose(np.load(tmp_path / f"{name}.npy"), expected, atol=1e-5)


def test_an_onnx_file_with_preprocessing_takes_uint8_and_has_classes_and_preprocessing_in_its_metadata(tmp_path: Path) -> None:
    path = write_student(tmp_path / "m.safetensors", "mlp_small")
    record = export_digits(path, "onnx", tmp_path / "out", preprocess=True)
    assert record["opset"] >= 18
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    (images,) = session.get_inputs()
    assert (images.type, images.shape) == ("tensor(uint8)", ["batch", 3, 8, 8])
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == list("0123456789")
    assert json.loads(metadata["mean"]) == [0.5, 0.4, 0.3]
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), dtype=np.uint8)
    normalized = (pixels / 255 - np.reshape([0.5, 0.4, 0.3], (3, 1, 1))) / np.reshape([0.2, 0.3, 0.4], (3, 1, 1))
    expected = read_student(path).module(torch.from_numpy(normalized).float()).numpy()
    assert np.allclose(session.run(None, {"images": pixels})[0], expected, atol=1e-5)


def test_a_folder_of_timm_has_the_runs_preprocessing_and_classes(tmp_path: Path) -> None:
    path = write_student(tmp_path / "m.safetensors", VIT, image_size=32, val_resize=40)
    export_digits(path, "timm", tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    config = timm.data.resolve_model_data_config(model)
    assert config["input_size"] == (3, 32, 32)
    assert (list(config["mean"]), list(config["std"])) == ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    assert (config["interpolation"], config["crop_pct"]) == ("bilinear", 0.8)
    assert model.pretrained_cfg["label_names"] == list("0123456789")
    assert len(model.blocks) == 1
    saved = json.loads((tmp_path / "out/config.json").read_text())
    assert saved["num_classes"] == 10
    assert "num_classes" not in saved["model_args"]  # transformers would give it to the model twice


def test_timm_resizes_before_its_crop_to_the_side_of_the_run_at_every_image_size() -> None:
    for size in range(1, 641):
        for side in (round(size * 256 / 224), size + 1, size + 32):
            assert math.floor(size / crop_pct(size, side)) == side


@pytest.mark.parametrize(("sizes", "resize", "says"), [({32}, 32, 0), ({48}, 37, 0), ({32, 48}, 37, 1), ({(48, 32)}, 37, 0)])
def test_the_resize_that_is_exported_is_the_one_that_the_validation_images_in_files_get(
    tmp_path: Path, sizes: set[int | tuple[int, int]], resize: int, says: int
) -> None:
    for split, name in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
        (tmp_path / f"images/{split}/{name}").mkdir(parents=True)
        for number, size in enumerate(sizes):
            image = Image.new("RGB", size if isinstance(size, tuple) else (size, size))
            image.save(tmp_path / f"images/{split}/{name}/{number}.png")
    path, lines = write_student(tmp_path / "m.safetensors", "resnet8", image_size=32, classes=("a", "b")), list[str]()
    data, options = DataConfig(path=str(tmp_path / "images")), {"preprocess": False, "limit": 4, "tolerance": 1e-3}
    with notices_to(lines.append):
        record = export(read_student(path), "safetensors", tmp_path / "out", data, **options)
    assert record["val_resize"] == resize
    assert sum("without the resize" in line for line in lines) == says


class Spectrum(torch.nn.Module):
    """Its operator is not in ONNX."""

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(images_BCHW[:, 0]).real


def test_an_operator_that_onnx_lacks_is_named_in_one_line(tmp_path: Path) -> None:
    code = "import torch\nfrom tests.trainables.export.test_export import Spectrum\n\n"
    body = "def build(num_classes):\n    return torch.nn.Sequential(Spectrum(), torch.nn.Linear(8, num_classes))\n"
    (tmp_path / "spectrum.py").write_text(code + body)
    path = write_student(tmp_path / "m.safetensors", f"{tmp_path}/spectrum.py:build")
    with notices_to(lambda line: None), pytest.raises(ExportError) as refused:
        export_digits(path, "onnx", tmp_path / "out")
    assert "it has no operator for aten.linalg_eig" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_file_that_differs_by_more_than_is_allowed_is_refused_and_removed(tmp_path: Path) -> None:
    path, good = write_student(tmp_path / "m.safetensors", "resnet8"), tmp_path / "out"
    export_digits(path, "safetensors", good)
    before = (good / "export.json").read_bytes()
    for folder in (good, tmp_path / "other"):
        says = r"^safetensors of resnet8 differs from the checkpoint by \S+e-0\d, more than 0 \(0 × the largest output\), so"
        with pytest.raises(ExportError, match=says):
            export_digits(path, "safetensors", folder, tolerance=0)
    assert (good / "export.json").read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.safetensors", "out"]


def test_what_a_format_cannot_have_is_refused_with_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (write_student(tmp_path / f"{name}.safetensors", name, image_size=32) for name in ("resnet8", "squeezenet1_1"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    for path, to, options, says in [
        (ours, "timm", {}, "resnet8 is not a timm model: choose --to safetensors or onnx"),
        (theirs, "timm", {}, "squeezenet1_1 is not a timm model: choose --to torchvision, safetensors or onnx"),
        (ours, "torchvision", {}, "resnet8 is not a torchvision model: choose --to safetensors or onnx"),
        (theirs, "torchvision", {"preprocess": True}, "--preprocess: torchvision stores .* choose --to onnx or torch_export"),
        (ours, "onnx", {"folder": "m.onnx"}, "--out .*m.onnx: name a folder to write model.onnx and export.json into"),
        (ours, "onnx", {"folder": "full"}, "--out .*full has other files: choose another folder"),
        (ours, "onnx", {"folder": "full/notes.txt"}, "notes.txt: name a folder"),
    ]:
        with pytest.raises(ExportError, match=says):
            export_digits(path, to, tmp_path / options.pop("folder", "out"), **options)
    monkeypatch.setattr("trainables.export.formats.installed", lambda package: package != "onnxscript")
    with pytest.raises(ExportError, match=r"--to onnx needs onnxscript: `pip install raydistill\[export\]`"):
        export_digits(ours, "onnx", tmp_path / "out")


def test_a_state_dict_that_needs_this_package_is_a_notice(tmp_path: Path) -> None:
    lines: list[str] = []
    with notices_to(lines.append):
        export_digits(write_student(tmp_path / "m.safetensors", "resnet8"), "safetensors", tmp_path / "out")
    assert lines == ["resnet8 is built by raydistill: to load the file without it, choose --to onnx or torch_export"]


def test_images_of_other_classes_have_no_accuracy_and_that_is_a_notice(tmp_path: Path) -> None:
    path, lines = write_student(tmp_path / "m.safetensors", "mlp_small", classes=("cat", "dog")), list[str]()
    with notices_to(lines.append):
        found = export_digits(path, "torch_export", tmp_path / "out")["comparison"]
    assert found["same_top1_pct"] == 100
    assert "top1_pct" not in found
    assert lines == ["digits does not have the student's classes: the accuracy is not measured"]


def test_images_are_taken_from_the_whole_split(tmp_path: Path) -> None:
    path = write_student(tmp_path / "m.safetensors", "mlp_small")
    found = export_digits(path, "safetensors", tmp_path / "out", limit=50)["comparison"]
    assert 40 <= found["num_images"] <= 50 < found["num_val_images"]
    whole = export_digits(path, "safetensors", tmp_path / "out", limit=10**6)["comparison"]
    assert whole["num_images"] == whole["num_val_images"]


TWENTY = [
    *(("resnet20", 32), ("vgg8_cifar", 32), ("mobilenetv2_half_cifar", 32), ("shufflenetv1_cifar", 32), ("wrn_16_1", 32)),
    *(("resnet50", 64), ("vgg11", 64), ("densenet121", 64), ("mobilenet_v3_large", 64), ("efficientnet_b0", 64)),
    *(("regnet_y_400mf", 64), ("swin_t", 64), ("convnext_tiny", 64), ("googlenet", 64)),
    *(("timm/resnet26d", 64), ("timm/mobilenetv4_conv_small", 64), ("timm/efficientvit_b0", 64)),
    *(("timm/deit_tiny_distilled_patch16_224", 64), ("timm/mobileone_s0", 64), ("timm/tiny_vit_5m_224", 64)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "size"), TWENTY)
def test_models_of_three_libraries_are_exported_to_onnx(
    tmp_path: Path, model: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    record = export_digits(write_student(tmp_path / "m.safetensors", model, image_size=size), "onnx", tmp_path / "out")
    found, mib = record["comparison"], (tmp_path / "out/model.onnx").stat().st_size / 2**20
    with capsys.disabled():
        difference = f"{found['max_difference']:.2e} | {found['max_output']:.3g}"
        print(f"| {model} | {size} | {record['opset']} | {mib:.1f} | {difference} | {found['same_top1_pct']:.0f} |")
    assert found["max_difference"] <= found["tolerance"]
