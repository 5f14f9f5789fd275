"""What a teacher's weights were trained on, without a download."""

import json
from pathlib import Path

import pytest

from trainables.engine import checkpoint
from trainables.errors import ModelError
from trainables.models.model_input import trained_input
from trainables.models.registry import build_model

CIFAR = {"mean": [0.5071, 0.4867, 0.4408], "std": [0.2675, 0.2565, 0.2761]}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(path: Path, **about: object) -> Path:
    header = {"model": "mlp_small", "num_classes": 10, "image_size": 8, "classes": list("0123456789"), **about}
    state = build_model("mlp_small", num_classes=10, image_size=8, seed=1).state_dict()
    checkpoint.write_tensors(path, {f"model.{name}": tensor for name, tensor in state.items()}, header)
    return path


def test_a_record_says_how_images_were_resized(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    records = [
        trained_input("vit_b_16", "IMAGENET1K_SWAG_E2E_V1"),
        trained_input("resnet50", "IMAGENET1K_V2"),
        trained_input("timm/vit_base_patch16_224", "DEFAULT"),
        trained_input("mlp_small", str(write(tmp_path / "cifar.safetensors", **CIFAR))),
    ]
    assert [record and record.interpolation for record in records] == ["bicubic", "bilinear", "bicubic", "bilinear"]


def test_weights_without_a_record_have_none(tmp_path: Path) -> None:
    old = trained_input("mlp_small", str(write(tmp_path / "old.safetensors")))
    assert old is not None
    assert (old.image_size, old.mean) == (8, ())
    (tmp_path / "plain.pth").write_bytes(json.dumps({}).encode())
    assert trained_input("mlp_small", str(tmp_path / "plain.pth")) is None
    assert trained_input("mlp_small", "no_such_weights") is None
    with pytest.raises(ModelError, match="no_such_weights"):
        trained_input("resnet18", "no_such_weights")


def test_the_record_in_a_folder_that_timm_saved_is_read_and_another_programs_config_is_none(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    record = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 64, 64]}
    config = {"architecture": "resnet10t", "num_classes": 2, "pretrained_cfg": record}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for weights in (tmp_path, f"local-dir:{tmp_path}"):
        found = trained_input("timm/resnet10t", str(weights))
        assert found is not None
        assert (found.mean, found.image_size, found.num_classes) == ((0.5, 0.5, 0.5), 64, 2)
    for other in ({"lr": 0.1}, {"architecture": "mine"}, ["x"]):
        (tmp_path / "config.json").write_text(json.dumps(other))
        assert trained_input("timm/resnet10t", str(tmp_path)) is None
