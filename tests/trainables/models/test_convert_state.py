"""Weights that only the model's own library can fit: of another image size, in numpy's files, in folders that timm saved."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision.models.vision_transformer import interpolate_embeddings

from tests.trainables.models.small_families import NoDraws, small
from tests.trainables.models.test_weights import CLASSES, assert_same, load, refusal
from trainables.errors import ModelError
from trainables.models.convert_state import converted
from trainables.models.libraries.timm import architecture
from trainables.models.registry import construct
from trainables.models.state_match import find_matches
from trainables.models.weight_files import Candidate
from trainables.models.weights import teacher_sha256
from trainables.notices import notices_to

pytest.importorskip("timm")
from timm.layers import resample_abs_pos_embed

FIT: dict[str, Any] = {"image_size": 64, "classes": CLASSES, "seed": 0}
TINY = "timm/vit_tiny_patch16_224"


def test_a_position_table_of_another_image_size_is_resampled_as_the_library_does(tmp_path: Path) -> None:
    path = tmp_path / "vit.pth"
    lines: list[str] = []
    state = construct(TINY, num_classes=4, image_size=224, seed=1).state_dict()
    torch.save({"model": state}, path)
    with notices_to(lines.append):
        teacher = load(path, TINY, image_size=64)
    expected = resample_abs_pos_embed(state["pos_embed"], [4, 4], num_prefix_tokens=1)
    assert torch.equal(teacher.state_dict()["pos_embed"], expected)
    resampled = "timm resampled pos_embed (1, 197, 192) → (1, 17, 192), for images of 64×64"
    assert lines[0] == f"weights {path}: model: {resampled}"
    load(path, TINY, image_size=64, sha256=teacher_sha256(TINY, str(path), **FIT))


def test_torchvisions_position_table_is_resampled_too() -> None:
    state, model = small("vit", 96).state_dict(), small("vit", 64)
    (match,) = find_matches([Candidate("", state, ())], model, None, "vit.pth")
    resampled, how = converted(model, match, 64)
    assert how == "torchvision resampled encoder.pos_embedding (1, 10, 16) → (1, 5, 16), for images of 64×64"
    assert torch.equal(resampled["encoder.pos_embedding"], interpolate_embeddings(64, 32, state)["encoder.pos_embedding"])


def test_a_table_that_no_library_resamples_is_refused_with_the_size_that_fits(tmp_path: Path) -> None:
    name = "timm/cait_xxs24_224"
    with NoDraws():
        torch.save(construct(name, num_classes=4, image_size=224, seed=1).state_dict(), tmp_path / "x.pth")
    assert "set teacher.image_size to 224" in refusal(tmp_path / "x.pth", name, image_size=64)


def test_an_npz_file_is_converted_by_timm_or_refused(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    with NoDraws():
        model = construct("timm/resnetv2_50x1_bit", num_classes=4, image_size=64, seed=0)
    assert "which timm converts for ViTs and ResNetV2s, not for convnet_small" in refusal(numpy_file(tmp_path, {"a": np.ones(2)}))
    arrays: dict[str, Any] = {}
    for key, tensor in model.state_dict().items():
        arrays[bit_name(key)] = bit_array(chance.standard_normal(tuple(tensor.shape)).astype(np.float32))
    path = numpy_file(tmp_path, arrays)
    lines: list[str] = []
    with notices_to(lines.append):
        teacher = load(path, "timm/resnetv2_50x1_bit", image_size=64)
    assert lines[0] == f"weights {path}: converted by timm for timm/resnetv2_50x1_bit"
    assert torch.equal(teacher.get_parameter("head.fc.bias"), torch.from_numpy(arrays["resnet/head/conv2d/bias"]))
    arrays["resnet/head/conv2d/kernel"], arrays["resnet/head/conv2d/bias"] = np.ones((1, 1, 2048, 9)), np.ones(9)
    assert "head.fc.weight" in refusal(numpy_file(tmp_path, arrays), "timm/resnetv2_50x1_bit", image_size=64)


def numpy_file(folder: Path, arrays: dict[str, Any]) -> Path:
    np.savez(folder / "x.npz", **arrays)
    return folder / "x.npz"


def bit_array(array: Any) -> Any:
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array


def bit_name(key: str) -> str:
    """The name of a tensor in Google's BiT files."""
    *path, leaf = key.split(".")
    leaf = {"weight": "gamma", "bias": "beta"}[leaf] if path[-1].startswith("norm") else "standardized_conv2d/kernel"
    match path:
        case ["head", _]:
            return f"resnet/head/conv2d/{'kernel' if key.endswith('weight') else 'bias'}"
        case ["stem", _]:
            return f"resnet/root_block/{leaf}"
        case ["norm"]:
            return f"resnet/group_norm/{leaf}"
    at = f"resnet/block{int(path[1]) + 1}/unit{int(path[3]) + 1:02d}"
    if path[4] == "downsample":
        return f"{at}/a/proj/{leaf}"
    return f"{at}/{'abc'[int(path[4][-1]) - 1]}/{'group_norm/' if path[4].startswith('norm') else ''}{leaf}"


def folder_of_timm(root: Path, architecture: str) -> Path:
    model = construct("timm/resnet10t", num_classes=4, image_size=64, seed=1)
    root.mkdir()
    save_file(model.state_dict(), root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps({"architecture": architecture, "num_classes": 4, "pretrained_cfg": {}}))
    return root


def test_a_folder_that_timm_saved_loads_as_weights_and_as_a_models_name(tmp_path: Path) -> None:
    folder, lines = folder_of_timm(tmp_path / "saved", "resnet10t"), list[str]()
    model = construct("timm/resnet10t", num_classes=4, image_size=64, seed=1)
    with notices_to(lines.append):
        assert_same(load(folder, "timm/resnet10t", image_size=64), model)
    assert lines[0] == f"weights {folder}: model.safetensors in it"
    name = f"local-dir:{folder}"
    assert_same(load(name, name, image_size=64), model)
    assert "has a resnet10t, not a resnet18: write timm/resnet10t" in refusal(folder, "timm/resnet18", image_size=64)
    (folder / "config.json").write_text('{"lr": 0.1}')  # a training script's
    assert_same(load(folder, "timm/resnet10t", image_size=64), model)


def test_a_folder_of_shards_loads_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    state = construct("convnet_small", num_classes=4, image_size=8, seed=1).state_dict()
    names = sorted(state)
    files = {name: f"model-0000{1 + (name > names[5])}-of-00002.safetensors" for name in names}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    expected = construct("convnet_small", num_classes=4, image_size=8, seed=1)
    assert_same(load(tmp_path), expected)
    assert_same(load(tmp_path / "model.safetensors.index.json"), expected)
    (tmp_path / files[names[0]]).unlink()
    assert "its shard model-00001-of-00002.safetensors is missing: fetch all 2 shards" in refusal(tmp_path)


def test_a_model_of_transformers_is_refused_where_timms_is_meant(tmp_path: Path) -> None:
    folder_of_timm(tmp_path / "hf", "x")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match=r"is a transformers vit, not a timm model: write model: local-dir:"):
        architecture(f"local-dir:{tmp_path / 'hf'}")


def test_the_weights_that_a_folders_name_stands_for_are_its_default(tmp_path: Path) -> None:
    name = f"local-dir:{folder_of_timm(tmp_path / 'saved', 'resnet10t')}"
    assert_same(load("DEFAULT", name, image_size=64), construct("timm/resnet10t", num_classes=4, image_size=64, seed=1))


def test_a_file_that_records_another_model_is_refused_although_its_tensors_fit(tmp_path: Path) -> None:
    path, name = tmp_path / "x.pth", "timm/mobilenetv3_small_100"
    fit: dict[str, Any] = {"image_size": 32}
    state = construct(name, num_classes=4, image_size=32, seed=1).state_dict()
    torch.save({"state_dict": {"model": state}, "arch": "tf_mobilenetv3_small_100.in1k"}, path)
    problem = "is a tf_mobilenetv3_small_100 by its entry arch, not a mobilenetv3_small_100: write timm/tf_mobilenetv3_small_100"
    assert problem in refusal(path, name, **fit)
    load(path, "timm/tf_mobilenetv3_small_100", **fit)
    for arch in ("mobilenetv3_small_100", "mobilenetv3", 3):  # timm's Python class is of many models
        torch.save({"state_dict": state, "arch": arch}, path)
        load(path, name, **fit)
