"""Files of weights as training scripts write them: what is taken from each, and what the user reads about it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainables.models.small_families import NoDraws
from tests.trainables.models.test_weights import CLASSES, assert_same, convnet, load, refusal
from trainables.models.registry import build_model
from trainables.models.weights import teacher_sha256
from trainables.notices import notices_to

STATE = dict(convnet().state_dict())
OTHER = dict(convnet(seed=2).state_dict())
NINE = dict(convnet(num_classes=9).state_dict())


def under(prefix: str, state: Mapping[str, Tensor] = STATE) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def loaded(content: Any, path: Path, **options: Any) -> tuple[nn.Module, list[str]]:
    """The teacher, and the notices without the path, except the one that the file has no class names."""
    lines: list[str] = []
    with notices_to(lines.append):
        teacher = load(saved(path, content), **options)
    return teacher, [line.removeprefix(f"weights {path}: ") for line in lines if "no usable class names" not in line]


AVERAGED = {"state_dict": under("model.", OTHER), "n_averaged": torch.tensor(5)}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (under("_orig_mod.module."), "prefix '_orig_mod.module.' removed"),
        (under("module.model.net._orig_mod."), "prefix 'module.model.net._orig_mod.' removed"),
        ({**under("module."), "n_averaged": torch.tensor(5)}, "prefix 'module.' removed"),
        (
            {
                "state_dict": {**under("net."), "criterion.w": torch.ones(1), "acc.n": torch.ones(1)},
                "epoch": 1,
                "lr": [],
            },
            "state_dict, prefix 'net.' removed; other entries ignored: epoch, lr, criterion.… and 1 more",
        ),
        (
            {"model_ema": under("module."), "model": OTHER, "optimizer": {"state": {0: {"m": torch.ones(2)}}}},
            "model_ema, prefix 'module.' removed; other entries ignored: model, optimizer",
        ),
        ({"state_dict_ema": STATE, "state_dict": OTHER}, "state_dict_ema; other entries ignored: state_dict"),
        ({"ema_state_dict": STATE, **AVERAGED}, "ema_state_dict; other entries ignored: state_dict, n_averaged"),
        (
            {"state_dict": under("model.", OTHER) | under("ema_model.")},
            "state_dict, prefix 'ema_model.' removed; other entries ignored: model.…",
        ),
        (
            {"teacher": {**under("module.backbone."), "module.head.last.weight": torch.ones(2)}, "student": {"a": torch.ones(1)}},
            "teacher, prefix 'module.backbone.' removed; other entries ignored: student, module.…",
        ),
        (
            {name.replace("head.", "head.1."): tensor for name, tensor in STATE.items()},
            "head.1.weight as head.weight",
        ),
        (
            {name.replace("features.", "features.module."): tensor for name, tensor in STATE.items()},
            "features.module.0.weight as features.0.weight",
        ),
    ],
)
def test_the_one_model_in_a_file_is_taken_and_a_notice_says_how(content: Any, line: str, tmp_path: Path) -> None:
    teacher, lines = loaded(content, tmp_path / "x.pth")
    assert_same(teacher, convnet())
    assert lines == [line]


def test_a_plain_state_dict_needs_no_notice(tmp_path: Path) -> None:
    assert loaded(STATE, tmp_path / "x.pth")[1] == []


def split_head(head: str = "head.fc.", **more: Tensor) -> dict[str, Tensor]:
    """The model as OpenMMLab's and many other trainings save it: backbone.… and a classifier next to it."""
    body = {f"backbone.{name}": tensor for name, tensor in STATE.items() if not name.startswith("head.")}
    return body | {head + leaf: STATE[f"head.{leaf}"] for leaf in ("weight", "bias")} | more


def test_a_classifier_next_to_the_backbone_is_the_models(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    teacher, lines = loaded({"state_dict": split_head()}, path)
    assert_same(teacher, convnet())
    assert lines == ["state_dict, prefix 'backbone.' removed, head.fc.weight as head.weight"]
    assert loaded(split_head("head."), path)[1] == ["prefix 'backbone.' removed"]
    two_heads = split_head(**{"cls_head.weight": STATE["head.weight"], "cls_head.bias": STATE["head.bias"]})
    assert "without its classifier under 'backbone.'" in refusal(saved(path, two_heads))
    assert "without its classifier under 'backbone.'" in refusal(saved(path, split_head("projector.")))
    assert "without its classifier under 'backbone.'" in refusal(saved(path, split_head("rot_head.")))
    neck = {"neck.weight": torch.eye(STATE["head.weight"].shape[1])}
    assert "without its classifier under 'backbone.'" in refusal(saved(path, split_head(**neck)))
    of_two = split_head() | {name: tensor[:2] for name, tensor in split_head().items() if "head" in name}
    assert "has 2 classes and the data has 4" in refusal(saved(path, of_two))


@pytest.mark.parametrize(
    ("content", "addresses", "key"),
    [
        ({"student": STATE, "teacher": OTHER}, "student and teacher", "student"),
        ({"state_dict": under("student.") | under("teacher.", OTHER)}, "state_dict.student and state_dict.teacher", "student"),
        ({"best": STATE, "last": {"model": OTHER}}, "best and last.model", "best"),
    ],
)
def test_of_two_models_that_fit_none_is_guessed_and_weights_key_chooses(
    content: Any, addresses: str, key: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "x.pth", content)
    assert f"has 2 models that fit convnet_small, {addresses}: choose one with weights_key" in refusal(path)
    assert_same(load(path, weights_key=key), convnet())
    assert "has no weights_key 'ema': choose from" in refusal(path, weights_key="ema")


def test_weights_key_chooses_what_an_average_would_be_taken_before(tmp_path: Path) -> None:
    content = {"model": STATE, "model_ema": OTHER}
    assert_same(load(saved(tmp_path / "x.pth", content), weights_key="model"), convnet())
    assert_same(load(saved(tmp_path / "x.pth", content)), convnet(seed=2))


def test_the_hash_of_a_teacher_does_not_depend_on_the_wrapping_of_its_file(tmp_path: Path) -> None:
    contents: list[Any] = [STATE, under("module."), {"model_ema": under("module."), "model": OTHER, "epoch": 1}]
    hashes = {
        teacher_sha256("convnet_small", str(saved(tmp_path / "x.pth", content)), image_size=8, classes=CLASSES, seed=0)
        for content in contents
    }
    assert len(hashes) == 1
    assert_same(load(tmp_path / "x.pth", sha256=hashes.pop()), convnet())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {
                **{k: v for k, v in STATE.items() if "head" not in k},
                "head.0.weight": STATE["head.weight"],
                "head.2.weight": torch.ones(9),
            },
            "it lacks head.weight, head.bias; has unknown head.0.weight, head.2.weight",
        ),
        (
            {k.replace("head.", "head.1."): v for k, v in NINE.items()},
            "has 9 classes and the data has 4",
        ),
        ({"state": {}, "param_groups": [{"lr": 0.1}]}, "is an optimizer's state, without a model"),
        ({**STATE, "head.lora_A.weight": torch.ones(1)}, "it is the LoRA layers of an adapter: merge them"),
        ({"vit.embeddings.cls_token": torch.ones(1)}, "it is a model of Hugging Face transformers"),
        ({k.replace("head.weight", "head.weight_v"): v for k, v in STATE.items()}, "it is a model with weight_norm"),
        (
            {k.replace("head.weight", "head.parametrizations.weight.original0"): v for k, v in STATE.items()},
            "merge each into its layer (parametrize.remove_parametrizations,",
        ),
        ({**STATE, "head.zero_point": torch.ones(1)}, "it is a quantized model: give the weights from which it was made"),
    ],
)
def test_a_file_without_the_whole_model_is_refused_by_what_it_lacks(content: Any, says: str, tmp_path: Path) -> None:
    assert says in refusal(saved(tmp_path / "x.pth", content))


def test_the_names_in_torchvisions_files_of_densenets_are_understood(tmp_path: Path) -> None:
    with NoDraws():
        model = build_model("densenet121", num_classes=4, image_size=32, seed=0)
    old: Callable[[str], str] = lambda name: name.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2.")  # noqa: E731
    path = saved(tmp_path / "densenet121.pth", {old(name): tensor for name, tensor in model.state_dict().items()})
    assert_same(load(path, "densenet121", image_size=32), model)
