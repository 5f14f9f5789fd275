"""Models of Hugging Face transformers, against its own forward; what needs no transformers is tested without it."""

import json
import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainables import jobs
from trainables.distributed.group import Group
from trainables.engine import checkpoint
from trainables.engine.dry_run import check_fit
from trainables.errors import DistillError, ModelError
from trainables.models.libraries import LIBRARIES
from trainables.models.model_input import trained_input
from trainables.models.names import ModelName, check_model_name
from trainables.models.registry import build_model
from trainables.models.taps import Taps
from trainables.models.weights import begin_with, load_teacher
from trainables.notices import notices_to

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

VIT = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 10}
REGISTERS = {**VIT, "num_register_tokens": 2}
TOWERS = {"vision_config": VIT, "text_config": TEXT}
CNN = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
TINY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("vit", "deit", "dinov2", "siglip_vision_model", "clip_vision_model", "beit", "ijepa", "vit_msn"), VIT),
    **dict.fromkeys(("dinov2_with_registers", "dinov3_vit"), REGISTERS),
    **dict.fromkeys(("clip", "siglip"), TOWERS),
    **dict.fromkeys(("dinov3_convnext", "convnext", "convnextv2"), CNN),
    **dict.fromkeys(("swin", "swinv2"), SWIN),
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "groups_width": 4},
}
CLASSES = ("cat", "dog", "fox")


def folder(root: Path, config: dict[str, Any], **files: dict[str, Any]) -> str:
    """The name of a model in a folder of JSON files."""
    root.mkdir(exist_ok=True)
    for file, content in {"config": config, **files}.items():
        (root / f"{file}.json").write_text(json.dumps(content))
    return f"local-dir:{root}"


def saved(root: Path, kind: str, *, classes: tuple[str, ...] = (), **changes: Any) -> tuple[str, Any]:
    """A tiny model with random values that transformers saves there: its name, and itself."""
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**{**TINY[kind], **changes})
    auto = transformers.AutoModel
    if classes:
        config.id2label = dict(enumerate(classes))
        config.architectures = ["DeiTForImageClassification"]  # of DeiT there are two; others read it not
        auto = transformers.AutoModelForImageClassification
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(root)
    return f"local-dir:{root}", model


def load(name: str, classes: tuple[str, ...] = (), image_size: int = 32, **changes: Any) -> nn.Module:
    return load_teacher(name, changes.pop("weights", name), image_size=image_size, classes=classes, seed=0, **changes)


def tapped(model: nn.Module, images_BCHW: Tensor) -> dict[str, Tensor]:
    names = ("map", "embedding")
    taps = Taps(model, names, name="x", image_size=images_BCHW.shape[-1])
    with taps.capture(), torch.no_grad():
        output = model(images_BCHW)
        return {"output": output, **dict(zip(names, taps.pop(), strict=True))}


def test_a_folder_of_transformers_is_its_own_librarys_and_one_of_timm_is_timms(tmp_path: Path) -> None:
    if find_spec("transformers"):
        name = folder(tmp_path / "vit", {"model_type": "vit"})
        assert check_model_name(name) == ModelName("transformers", name)
    pytest.importorskip("timm")
    name = folder(tmp_path / "timm", {"architecture": "resnet10t", "model_type": "timm_wrapper"})
    assert check_model_name(name) == ModelName("timm", name)


def test_a_model_whose_features_are_not_known_is_refused_by_its_type(tmp_path: Path) -> None:
    for config in ({"model_type": "detr"}, {"model_type": "owlvit", "vision_config": {}}, {"model_type": "mobilevitv2"}):
        with pytest.raises(ModelError, match=r"is a transformers (detr|owlvit_vision_model|mobilevitv2); choose one of vit, "):
            check_model_name(folder(tmp_path, config))


def test_without_transformers_its_models_say_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # Python's own way to mark a package as not importable
    with pytest.raises(ModelError, match=r"pip install raydistill\[transformers\]"):
        check_model_name(folder(tmp_path, {"model_type": "clip", "vision_config": {}}))


def test_its_image_processor_says_how_images_were_prepared(tmp_path: Path) -> None:
    library = LIBRARIES["transformers"]
    statistics = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2], "resample": 3}
    crop = {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}, **statistics}
    name = folder(tmp_path / "crop", {"model_type": "dinov2", "image_size": 518}, preprocessor_config=crop)
    record = library.input(name, "DEFAULT")
    assert record is not None
    assert record[:6] == (224, (0.5, 0.4, 0.3), (0.2, 0.2, 0.2), 0, 256, "bicubic")
    assert library.has_fixed_size(name)
    whole = {"size": {"height": 384, "width": 384}, "do_normalize": False}
    labels = {"architectures": ["SwinForImageClassification"], "id2label": {"10": "c", "2": "b", "1": "a"}}
    name = folder(tmp_path / "whole", {"model_type": "swin", **labels}, processor_config={"image_processor": whole})
    record = library.input(name, "DEFAULT")
    assert record is not None
    assert record[:7] == (384, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 3, 384, "bilinear", ("a", "b", "c"))
    twice = {"size": {"height": 224, "width": 224}, **statistics, "include_top": True, "crop_pct": None}
    name = folder(tmp_path / "twice", {"model_type": "efficientnet"}, preprocessor_config=twice)
    record = library.input(name, "DEFAULT")
    assert record is not None
    assert record[:5] == (224, (0.5, 0.4, 0.3), pytest.approx((0.04, 0.04, 0.04)), 0, 224)
    name = folder(tmp_path / "none", {"model_type": "vit", "image_size": 64})
    assert library.input(name, "DEFAULT") == (64, (), (), 0, None, "bilinear", (), ())
    assert library.default_size(name) == 64
    with pytest.raises(ModelError, match="has no weights 'IMAGENET1K_V1'; choose from DEFAULT"):
        library.input(name, "IMAGENET1K_V1")


@pytest.mark.parametrize(
    ("settings", "mean", "std"),
    [
        ({"image_mean": 0.5, "image_std": 0.25}, 0.5, 0.25),
        ({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [51.0] * 3}, 0.5, 0.2),
        ({"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [0.5] * 3}, 0.5, 0.25),
        ({"rescale_factor": 1 / 127.5, "rescale_offset": True, "do_normalize": False}, 0.5, 0.5),
    ],
)
def test_the_range_of_its_pixels_is_part_of_its_mean_and_deviation(
    settings: dict[str, Any], mean: float, std: float, tmp_path: Path
) -> None:
    record = LIBRARIES["transformers"].input(folder(tmp_path, {"model_type": "vit"}, preprocessor_config=settings), "DEFAULT")
    assert record is not None
    assert record[1:3] == (pytest.approx((mean,) * 3), pytest.approx((std,) * 3))


@pytest.mark.parametrize(
    ("size", "side", "said"),
    [
        ({"height": 192, "width": 256}, 192, "images of 192 × 256 pixels; here they are squares of 192"),
        ({"longest_edge": 256}, 256, "images whose longer side has 256 pixels; here they are squares of that side"),
        ([128, 128], 128, ""),
    ],
)
def test_a_size_that_is_not_square_has_a_notice(size: Any, side: int, said: str, tmp_path: Path) -> None:
    name, lines = folder(tmp_path, {"model_type": "vit"}, preprocessor_config={"size": size}), list[str]()
    with notices_to(lines.append):
        record = LIBRARIES["transformers"].input(name, "DEFAULT")
    assert record is not None
    assert (record.image_size, record.val_resize) == (side, side)
    assert lines == ([f"{name}: it was trained on {said}"] if said else [])


def test_a_processor_that_does_not_resize_leaves_the_size_to_the_model_and_text_is_no_size(tmp_path: Path) -> None:
    unused = {"do_resize": False, "size": {"height": 32, "width": 32}}
    name = folder(tmp_path / "as_is", {"model_type": "vit", "image_size": 64}, preprocessor_config=unused)
    record = LIBRARIES["transformers"].input(name, "DEFAULT")
    assert record is not None
    assert (record.image_size, record.val_resize) == (64, None)
    name = folder(tmp_path / "text", {"model_type": "vit"}, preprocessor_config={"size": "32"})
    with pytest.raises(ModelError, match="the image size '32' in its JSON files is not a number of pixels"):
        LIBRARIES["transformers"].input(name, "DEFAULT")


def test_the_labels_of_a_config_that_does_not_name_its_class_are_the_classifiers(tmp_path: Path) -> None:
    name = folder(tmp_path, {"model_type": "vit", "id2label": {"0": "fox", "1": "cat"}})
    record = LIBRARIES["transformers"].input(name, "DEFAULT")
    assert record is not None
    assert (record.num_classes, record.categories) == (2, ("fox", "cat"))
    name = folder(tmp_path / "odd", {"model_type": "vit", "architectures": [None], "id2label": {"0": "fox", "1": "cat"}})
    record = LIBRARIES["transformers"].input(name, "DEFAULT")
    assert record is not None
    assert record.num_classes == 0


def test_a_model_of_bgr_images_and_labels_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    library = LIBRARIES["transformers"]
    name = folder(tmp_path / "bgr", {"model_type": "vit"}, preprocessor_config={"do_flip_channel_order": True})
    for weights in ("DEFAULT", str(tmp_path / "bgr" / "config.json")):
        with pytest.raises(ModelError, match="takes BGR images"):
            library.input(name, weights)
    labels = {"architectures": ["ViTForImageClassification"], "id2label": ["a", "b"]}
    with pytest.raises(ModelError, match="is not a mapping: write"):
        library.input(folder(tmp_path / "list", {"model_type": "vit", **labels}), "DEFAULT")


@needs_transformers
@pytest.mark.parametrize("kind", TINY)
def test_features_are_those_of_transformers_own_forward(kind: str, tmp_path: Path) -> None:
    name, original = saved(tmp_path, kind)
    original = getattr(original, "vision_model", original)
    resized = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in signature(original.forward).parameters else {}
    for size in (32, 64):
        images_BCHW, side = torch.randn(2, 3, size, size), size // (32 if kind == "dinov3_convnext" else 8)
        with torch.no_grad():
            expected = original(images_BCHW, **resized)
        map_BDhw, pooled = expected.last_hidden_state, getattr(expected, "pooler_output", None)
        if kind in ("vit", "deit", "vit_msn"):
            pooled = map_BDhw[:, 0]
        if map_BDhw.ndim == 3:
            map_BDhw = map_BDhw[:, map_BDhw.shape[1] - side**2 :].transpose(1, 2).unflatten(2, (side, side))
        embedding_BD = map_BDhw.mean((2, 3)) if pooled is None else pooled.flatten(1)
        teacher = load(name, image_size=size, logits=False)
        found = tapped(teacher, images_BCHW)
        torch.testing.assert_close(found["map"], map_BDhw, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["embedding"], embedding_BD, atol=1e-5, rtol=1e-5)
        assert torch.equal(found["output"], found["embedding"])


@needs_transformers
@pytest.mark.parametrize("kind", ["vit", "deit", "dinov2", "clip", "siglip", "convnext", "swin", "resnet"])
def test_a_classifier_of_transformers_has_its_logits_and_without_it_its_features(kind: str, tmp_path: Path) -> None:
    name, original = saved(tmp_path, kind, classes=CLASSES)
    images_BCHW = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        logits_BK = original(images_BCHW).logits
        torch.testing.assert_close(load(name, CLASSES)(images_BCHW), logits_BK, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(load(name, ("fox", "cat"))(images_BCHW), logits_BK[:, [2, 0]], atol=1e-5, rtol=1e-5)
    bare = tapped(load(name, logits=False), images_BCHW)
    assert torch.equal(bare["output"], bare["embedding"])
    assert torch.equal(tapped(load(name, CLASSES), images_BCHW)["embedding"], bare["embedding"])


@needs_transformers
@pytest.mark.parametrize("kind", ["clip", "siglip", "vit", "beit"])
def test_each_trained_parameter_of_a_student_has_a_gradient_as_ddp_needs_it(kind: str, tmp_path: Path) -> None:
    for num_classes in (0, 3):
        student = build_model(saved(tmp_path, kind)[0], num_classes=num_classes, image_size=32, seed=0)
        student(torch.randn(2, 3, 32, 32)).square().sum().backward()
        assert not [name for name, parameter in student.named_parameters() if parameter.requires_grad and parameter.grad is None]


@needs_transformers
def test_weights_that_lack_tensors_or_a_classifier_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    name, _ = saved(tmp_path, "vit")
    lines = list[str]()
    with notices_to(lines.append):
        load(name, logits=False)
    assert lines[1:] == [f"weights {tmp_path / 'model.safetensors'}: other entries ignored: pooler.…"]
    with pytest.raises(DistillError, match="has no classifier"):
        load(name, CLASSES)
    file = tmp_path / "model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if key != "layernorm.weight"}, file)
    for weights in (name, "DEFAULT"):
        with pytest.raises(DistillError, match=r"lacks .*layernorm\.weight"):
            load(name, weights=weights, logits=False)
    name, _ = saved(tmp_path / "dinov3", "dinov3_vit")
    with pytest.raises(ModelError, match="is a dinov3_vit, for which transformers has no classifier"):
        build_model(name, num_classes=3, image_size=32, seed=0)
    features: dict[str, Any] = {"teacher": {"model": name}, "distill": {"method": ["embed"], "options": {}}}
    job = jobs.config(tmp_path, model="convnet_small", data={"image_size": 32}, **features)
    check_fit(job, num_classes=3)  # as a teacher of features it needs none


@needs_transformers
def test_weights_of_another_folder_are_of_the_model_that_its_config_builds(tmp_path: Path) -> None:
    images_BCHW = torch.randn(2, 3, 32, 32)
    name, _ = saved(tmp_path / "gelu", "vit")
    relu, original = saved(tmp_path / "relu", "vit", hidden_act="relu", classes=CLASSES)
    for classes, logits in ((CLASSES, True), (("x",), False)):
        own = load(relu, classes, logits=logits)(images_BCHW)
        assert torch.equal(load(name, classes, weights=relu, logits=logits)(images_BCHW), own)
    with torch.no_grad():
        torch.testing.assert_close(load(name, CLASSES, weights=relu)(images_BCHW), original(images_BCHW).logits)
    with pytest.raises(ModelError, match=r"resnet is a resnet, not a vit: write it as the model"):
        load(name, weights=saved(tmp_path / "resnet", "resnet")[0], logits=False)


@needs_transformers
def test_a_student_with_new_classes_begins_with_the_features_of_a_folder(tmp_path: Path) -> None:
    name, _ = saved(tmp_path, "dinov2")
    student, images_BCHW = build_model(name, num_classes=3, image_size=32, seed=1), torch.randn(2, 3, 32, 32)
    assert torch.equal(student(images_BCHW), build_model(name, num_classes=3, image_size=32, seed=1)(images_BCHW))
    begin_with(student, name, name, image_size=32, classes=CLASSES, seed=0, weights_key=None)
    found = tapped(student.eval(), images_BCHW)["embedding"]
    assert torch.equal(found, tapped(load(name, logits=False), images_BCHW)["embedding"])


@needs_transformers
def test_a_repository_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.invalid")  # no network: seconds, not a minute
    repository = tmp_path / "models--tests--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    local, _ = saved(repository / "snapshots" / ("0" * 40), "dinov3_convnext")
    name, images_BCHW = "hf-hub:tests/tiny", torch.randn(2, 3, 32, 32)
    assert check_model_name(name) == ModelName("transformers", name)
    for weights in (name, "DEFAULT"):
        assert torch.equal(load(name, weights=weights, logits=False)(images_BCHW), load(local, logits=False)(images_BCHW))
    with pytest.raises(ModelError, match=r"hf-hub:tests/none: its config.json could not be loaded"):
        check_model_name("hf-hub:tests/none")


@needs_transformers
def test_a_student_of_transformers_learns_a_teachers_features_and_its_checkpoint_is_read_again(tmp_path: Path) -> None:
    teacher, _ = saved(tmp_path / "teacher", "dinov2")
    student, _ = saved(tmp_path / "student", "vit", hidden_size=4)
    sections = {
        "model": student,
        "precision": "fp32",
        "data": {"labels": False, "image_size": 16},
        "teacher": {"model": teacher, "weights": teacher, "image_size": 32},
        "distill": {"method": "embed", "task_weight": 0.0, "options": {"embed": {}}},
    }
    outcome = jobs.train(Group(), jobs.config(tmp_path / "run", **sections))
    losses = [metrics["train/loss"] for kind, _, metrics in outcome["calls"] if kind == "step"]
    assert losses[-1] < losses[0]
    path = tmp_path / "run" / "best.safetensors"
    header = {"model": student, "num_classes": 0, "image_size": 16, "classes": []}
    checkpoint.write_tensors(path, {f"model.{key}": tensor for key, tensor in outcome["state"].items()}, header)
    again = load(student, weights=str(path), image_size=16, logits=False)
    assert all(torch.equal(tensor, outcome["state"][key]) for key, tensor in again.state_dict().items())
    assert trained_input(student, str(path)) is not None
