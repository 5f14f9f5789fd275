"""What a teacher's weights were trained on is compared with the data, without a download."""

import json
from pathlib import Path

import pytest

from trainables.config import DataConfig
from trainables.engine import checkpoint
from trainables.errors import CheckpointError, ModelError
from trainables.models.registry import build_model
from trainables.models.trained_input import check_trained_input, trained_input
from trainables.notices import notices_to

CIFAR = {"mean": [0.5071, 0.4867, 0.4408], "std": [0.2675, 0.2565, 0.2761]}
THOUSAND = [f"n{number:08d}" for number in range(1000)]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def refusal(name: str, weights: object, classes: list[str], **data: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_trained_input(name, str(weights), DataConfig.model_validate({"image_size": 224, **data}), classes)
    return str(caught.value)


def write(path: Path, **about: object) -> Path:
    header = {"model": "mlp_small", "num_classes": 10, "image_size": 8, "classes": list("0123456789"), **about}
    state = build_model("mlp_small", num_classes=10, image_size=8, seed=1).state_dict()
    checkpoint.write_tensors(path, {f"model.{name}": tensor for name, tensor in state.items()}, header)
    return path


def test_published_weights_of_another_normalisation_are_refused_with_what_to_write() -> None:
    pytest.importorskip("timm")
    says = refusal("timm/vit_base_patch16_224", "augreg2_in21k_ft_in1k", THOUSAND)
    assert says.endswith("set data.mean: [0.5, 0.5, 0.5] and data.std: [0.5, 0.5, 0.5]")
    assert "data.mean is [0.485, 0.456, 0.406]" in says
    half = {"mean": [0.5] * 3, "std": [0.5] * 3}
    check_trained_input("timm/vit_base_patch16_224", "DEFAULT", DataConfig(image_size=224, **half), THOUSAND)
    assert "set data.mean: [0.5, 0.5, 0.5]" in refusal("efficientnet_v2_l", "DEFAULT", THOUSAND)
    check_trained_input("resnet34", "IMAGENET1K_V1", DataConfig(image_size=224), THOUSAND)


def test_a_checkpoint_of_ours_of_another_normalisation_is_refused(tmp_path: Path) -> None:
    trained = write(tmp_path / "cifar.safetensors", **CIFAR)
    says = refusal("mlp_small", trained, list("0123456789"), image_size=8)
    assert says.endswith("set data.mean: [0.5071, 0.4867, 0.4408] and data.std: [0.2675, 0.2565, 0.2761]")
    close = DataConfig.model_validate({"image_size": 8, **CIFAR, "mean": [0.507, 0.487, 0.441]})
    check_trained_input("mlp_small", str(trained), close, list("0123456789"))


def test_a_record_says_how_images_were_resized(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    records = [
        trained_input("vit_b_16", "IMAGENET1K_SWAG_E2E_V1"),
        trained_input("resnet50", "IMAGENET1K_V2"),
        trained_input("timm/vit_base_patch16_224", "DEFAULT"),
        trained_input("mlp_small", str(write(tmp_path / "cifar.safetensors", **CIFAR))),
    ]
    assert [record and record.interpolation for record in records] == ["bicubic", "bilinear", "bicubic", "bilinear"]


def test_weights_without_a_record_have_nothing_to_compare(tmp_path: Path) -> None:
    assert trained_input("mlp_small", str(write(tmp_path / "old.safetensors"))) is None
    (tmp_path / "plain.pth").write_bytes(json.dumps({}).encode())
    assert trained_input("mlp_small", str(tmp_path / "plain.pth")) is None
    assert trained_input("mlp_small", "no_such_weights") is None
    with pytest.raises(ModelError, match="no_such_weights"):
        trained_input("resnet18", "no_such_weights")


def test_the_record_in_a_folder_that_timm_saved_is_compared_and_another_programs_config_is_none(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    record = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 64, 64]}
    config = {"architecture": "resnet10t", "num_classes": 2, "pretrained_cfg": record}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for weights in (tmp_path, f"local-dir:{tmp_path}"):
        assert "set data.mean: [0.5, 0.5, 0.5]" in refusal("timm/resnet10t", weights, ["a", "b"])
    for other in ({"lr": 0.1}, {"architecture": "mine"}, ["x"]):
        (tmp_path / "config.json").write_text(json.dumps(other))
        assert trained_input("timm/resnet10t", str(tmp_path)) is None


def test_another_image_size_is_a_notice() -> None:
    lines: list[str] = []
    with notices_to(lines.append):
        check_trained_input("resnet34", "IMAGENET1K_V1", DataConfig(image_size=160), THOUSAND)
    assert lines == ["teacher resnet34: IMAGENET1K_V1 is for images of 224 pixels, and data.image_size is 160"]
