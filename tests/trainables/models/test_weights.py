import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.trainables.models.small_families import NoDraws
from trainables.errors import CheckpointError, DistillError, ModelError
from trainables.models.checkpoint_header import CheckpointHeader, locate_checkpoint, read_checkpoint_header
from trainables.models.forward import has_classifier
from trainables.models.registry import build_model
from trainables.models.tap_names import classifier
from trainables.models.weights import begin_with, load_teacher, teacher_sha256
from trainables.notices import notices_to

CLASSES = ("cat", "dog", "emu", "fox")
THOUSAND: dict[str, Any] = {"classes": [str(label) for label in range(1000)]}


def convnet(seed: int = 1, num_classes: int = 4) -> nn.Module:
    return build_model("convnet_small", num_classes=num_classes, image_size=8, seed=seed)


def write_checkpoint(path: Path, weights: nn.Module, /, **changes: Any) -> Path:
    about = {"model": "convnet_small", "num_classes": 4, "image_size": 8, "classes": CLASSES, "step": 7} | changes
    tensors = {f"model.{name}": tensor for name, tensor in weights.state_dict().items()}
    tensors |= {"method.fitnet.regressors.0.conv.weight": torch.zeros(8, 4, 1, 1), "method.crd.memory_student": torch.zeros(9, 4)}
    tensors |= {"optim.0.0.momentum_buffer": torch.zeros(3), "rng.0.cpu": torch.get_rng_state()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"raydistill": json.dumps(about)})
    return path


def load(weights: Path | str, name: str = "convnet_small", **changes: Any) -> nn.Module:
    options: dict[str, Any] = {"image_size": 8, "classes": CLASSES, "seed": 0}
    with NoDraws():  # all values come from the file
        return load_teacher(name, str(weights), **(options | changes))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def refusal(weights: Path | str, name: str = "convnet_small", **changes: Any) -> str:
    """The one line with which loading is refused."""
    with pytest.raises(DistillError) as caught:
        load(weights, name, **changes)
    assert isinstance(caught.value, CheckpointError | ModelError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_checkpoint_of_ours_loads_frozen_in_eval_mode_without_its_methods_and_optimizer(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "best.safetensors", convnet())
    teacher = load(path)
    assert_same(teacher, convnet())
    assert not teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())
    assert read_checkpoint_header(path) == CheckpointHeader("convnet_small", 4, 8, CLASSES)


def test_a_run_directory_stands_for_its_students_best_and_a_stage_directory_for_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "student/checkpoints/best.safetensors", convnet(1))
    write_checkpoint(tmp_path / "teacher/checkpoints/best.safetensors", convnet(2))
    assert_same(load(tmp_path), convnet(1))
    assert_same(load(tmp_path / "teacher"), convnet(2))
    (tmp_path / "empty").mkdir()
    assert "has no student/checkpoints/best.safetensors or checkpoints/best.safetensors" in refusal(tmp_path / "empty")


def test_loading_moves_nobody_elses_randomness(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "best.safetensors", convnet())
    before = torch.get_rng_state()
    load(path)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("about", "options", "says"),
    [
        ({"model": "mlp_small"}, {}, "is a mlp_small, not a convnet_small"),
        (
            {"classes": (*CLASSES[1:], "gnu")},
            {},
            "has 4 classes, none of them 'cat', and the data has 4: choose weights trained on these",
        ),
        ({"num_classes": 3, "classes": CLASSES[:3]}, {}, "has 3 classes, none of them 'fox', and the data has 4"),
        ({"num_classes": "many"}, {}, "does not describe its model"),
        ({"model": "resnet9000"}, {}, "there is no model 'resnet9000'"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, about: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    assert says in refusal(write_checkpoint(tmp_path / "best.safetensors", convnet(), **about), **options)


def test_a_checkpoint_of_more_classes_teaches_the_datas_with_their_logits(tmp_path: Path) -> None:
    path, lines = write_checkpoint(tmp_path / "best.safetensors", convnet()), list[str]()
    some = {"classes": ("fox", "dog")}
    with notices_to(lines.append):
        teacher = load(path, **some)
    assert lines == [f"weights {path}: 2 of its 4 classes are used, by name, in the order of the data's"]
    images = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(teacher(images), load(path)(images)[:, [3, 1]])
    assert classifier(teacher).out_features == 2
    fit: dict[str, Any] = {"image_size": 8, "seed": 0}
    hashes = [teacher_sha256("convnet_small", str(path), **fit, **each) for each in (some, some | {"classes": ("dog", "fox")})]
    assert len({*hashes, teacher_sha256("convnet_small", str(path), **fit, classes=CLASSES)}) == 3
    assert_same(load(path, **some, sha256=hashes[0]), teacher)
    assert "that the job started with" in refusal(path, **some, sha256=hashes[1])


def test_published_weights_teach_a_part_of_imagenet_by_wordnet_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    import torchvision

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    fetched = (
        tmp_path / "hub" / "checkpoints" / torchvision.models.get_model_weights("squeezenet1_1").DEFAULT.url.rpartition("/")[2]
    )
    fetched.parent.mkdir(parents=True)
    model = build_model("squeezenet1_1", num_classes=1000, image_size=64, seed=5).eval()
    torch.save(model.state_dict(), fetched)
    teacher = load("DEFAULT", "squeezenet1_1", image_size=64, classes=("n01443537", "n01440764"))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(teacher(images), model(images)[:, [1, 0]])


def test_a_safetensors_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "best.safetensors", convnet()).read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path = tmp_path / "cut.safetensors"
        path.write_bytes(whole[:length])
        assert "truncated or damaged" in refusal(path)


def test_plain_state_dicts_load_from_every_kind_of_file_and_wrapping(tmp_path: Path) -> None:
    state = convnet().state_dict()
    parallel = {f"module.{name}": tensor for name, tensor in state.items()}
    compiled = {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}
    wrapped = {"epoch": 240, "best_acc": 71.2, "model": state, "optimizer": {"state": {}}}
    for number, content in enumerate((state, parallel, compiled, wrapped, {"epoch": 3, "state_dict": parallel})):
        path = tmp_path / f"{number}.pth"
        torch.save(content, path)
        assert_same(load(path), convnet())
    save_file(state, tmp_path / "plain.safetensors")
    assert_same(load(tmp_path / "plain.safetensors"), convnet())
    assert read_checkpoint_header(tmp_path / "plain.safetensors") is None


def test_what_mdistiller_saves_loads_where_it_is_of_one_model(tmp_path: Path) -> None:
    state = convnet().state_dict()
    alone = {f"module.student.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 240, "model": alone, "best_acc": torch.tensor([70.0])}, tmp_path / "best")
    assert_same(load(tmp_path / "best"), convnet())
    both = alone | {f"module.teacher.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 240, "model": both}, tmp_path / "best")
    assert "model.module.student and model.module.teacher: choose one with weights_key" in refusal(tmp_path / "best")
    assert_same(load(tmp_path / "best", weights_key="student"), convnet())


def test_a_batch_norm_that_did_not_count_its_batches_loads(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in convnet().state_dict().items() if not name.endswith("num_batches_tracked")}
    assert len(state) < len(convnet().state_dict())
    torch.save({"model": state}, tmp_path / "teacher.pth")
    assert_same(load(tmp_path / "teacher.pth"), convnet())


def test_our_own_names_load_as_the_published_ones_do(tmp_path: Path) -> None:
    for name in ("wrn_16_1", "vgg8_cifar", "mobilenetv2_half_cifar"):
        model = build_model(name, num_classes=4, image_size=32, seed=3)
        torch.save(model.state_dict(), tmp_path / "teacher.pth")
        assert_same(load(tmp_path / "teacher.pth", name, image_size=32), model)


def test_a_pickle_that_holds_more_than_tensors_is_refused_and_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save({"state_dict": convnet().state_dict(), "extra": Bomb()}, tmp_path / "bomb.pt")
    says = refusal(tmp_path / "bomb.pt")
    assert "could run code" in says
    assert "mkdir" in says
    assert "torch.save(model.state_dict(), path)" in says
    assert not (tmp_path / "exploded").exists()
    torch.save(convnet(), tmp_path / "model.pt")
    assert "ConvNet" in refusal(tmp_path / "model.pt")


def test_damaged_and_odd_torch_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "teacher.pth"
    torch.save(convnet().state_dict(), path)
    whole = path.read_bytes()
    for content in (b"", b"not a checkpoint", whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        assert "damaged" in refusal(path)
    for odd, says in (([1, 2], "has no state dict"), ({}, "has no state dict"), ({"epoch": 3}, "has 'epoch', of type int")):
        torch.save(odd, path)
        assert says in refusal(path)


def test_a_state_dict_that_does_not_fit_names_the_first_differences(tmp_path: Path) -> None:
    path = tmp_path / "teacher.pth"
    state = dict(convnet().state_dict())
    torch.save({name: tensor for name, tensor in state.items() if name != "head.bias"} | {"extra.weight": torch.zeros(1)}, path)
    assert "it lacks head.bias; has unknown extra.weight; write the model" in refusal(path)
    torch.save(state | {"features.0.weight": torch.zeros(8, 1, 3, 3)}, path)
    assert "has other shapes: features.0.weight (8, 1, 3, 3) for (8, 3, 3, 3)" in refusal(path)
    torch.save(convnet(num_classes=100).state_dict(), path)
    assert "has 100 classes and the data has 4" in refusal(path)
    torch.save(state, path)
    assert "it lacks conv1.weight, " in refusal(path, "resnet8")


def test_a_teacher_needs_no_auxiliary_head(tmp_path: Path) -> None:
    state = build_model("googlenet", num_classes=4, image_size=64, seed=1).state_dict()
    torch.save({name: tensor for name, tensor in state.items() if not name.startswith("aux")}, tmp_path / "googlenet.pth")
    teacher = load(tmp_path / "googlenet.pth", "googlenet", image_size=64)
    assert torch.equal(teacher.get_parameter("fc.weight"), state["fc.weight"])


def test_a_missing_file_is_not_taken_for_the_name_of_weights(tmp_path: Path) -> None:
    for missing in ("gone.safetensors", "runs/gone", str(tmp_path / "gone")):
        assert "there is no file" in refusal(missing)
    assert locate_checkpoint("IMAGENET1K_V1") is None


def test_published_weights_that_do_not_exist_or_do_not_fit_are_refused() -> None:
    assert "did you mean IMAGENET1K_V1?" in refusal("IMAGENET1K_V11", "resnet18")
    assert "choose from IMAGENET1K_V1, DEFAULT" in refusal("mine", "resnet18")
    assert "has 1000 classes, none of them 'cat', and the data has 4" in refusal("DEFAULT", "resnet18")
    assert "IMAGENET1K_FEATURES of vgg16 has no classifier" in refusal("IMAGENET1K_FEATURES", "vgg16")
    assert "convnet_small has no published weights 'DEFAULT'" in refusal("DEFAULT")
    assert "does not accept these arguments" in refusal("DEFAULT", "resnet18(depth=3)", **THOUSAND)
    assert "set teacher.image_size to 224" in refusal("IMAGENET1K_V1", "vit_b_32", **THOUSAND, image_size=64)


def test_published_weights_that_were_fetched_before_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights = torchvision.models.get_model_weights("squeezenet1_1").DEFAULT
    fetched = tmp_path / "hub" / "checkpoints" / weights.url.rpartition("/")[2]
    fetched.parent.mkdir(parents=True)
    model = build_model("squeezenet1_1", num_classes=1000, image_size=64, seed=5)
    torch.save(model.state_dict(), fetched)
    for name in ("IMAGENET1K_V1", "DEFAULT"):
        assert_same(load(name, "squeezenet1_1", **THOUSAND, image_size=64), model)


def test_published_weights_are_one_teacher_by_name_and_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    options: dict[str, Any] = {**THOUSAND, "image_size": 64}
    made = tmp_path / "made.pth"
    torch.save(build_model("googlenet", seed=5, num_classes=1000, image_size=64).state_dict(), made)
    digits = hashlib.sha256(made.read_bytes()).hexdigest()[:8]
    published = torchvision.models.get_model_weights("googlenet").DEFAULT
    monkeypatch.setattr(published.value, "url", f"https://example.org/googlenet-{digits}.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    fetched = tmp_path / "hub" / "checkpoints" / f"googlenet-{digits}.pth"
    fetched.parent.mkdir(parents=True)
    fetched.write_bytes(made.read_bytes())
    torch.save({"state_dict": torch.load(made)}, again := tmp_path / "again.pth")

    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    teachers = [load(weights, "googlenet", **options) for weights in ("IMAGENET1K_V1", made, again)]
    with torch.no_grad():
        named, by_file, anothers = (teacher(images) for teacher in teachers)
    assert torch.equal(named, by_file)
    assert not torch.equal(named, anothers)  # of somebody who trained without it, for all that can be known
    expected = {**options, "seed": 0}
    hashes = [teacher_sha256("googlenet", str(weights), **expected) for weights in ("IMAGENET1K_V1", made, again)]
    assert hashes[0] == hashes[1] != hashes[2]
    for weights, other in (("IMAGENET1K_V1", hashes[2]), (again, hashes[0])):  # they differ in nothing but the scale
        assert "that the job started with" in refusal(weights, "googlenet", sha256=other, **options)


def test_weights_that_are_not_those_whose_hash_is_given_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "best.safetensors", convnet())
    sha256 = teacher_sha256("convnet_small", str(path), image_size=8, classes=CLASSES, seed=0)
    assert_same(load(path, sha256=sha256), convnet())
    write_checkpoint(path, convnet(seed=2))
    assert refusal(path, sha256=sha256).startswith(f"{path}: ")
    torch.save({f"module.{name}": tensor.half() for name, tensor in convnet().state_dict().items()}, tmp_path / "half.pt")
    halved = teacher_sha256("convnet_small", str(tmp_path / "half.pt"), image_size=8, classes=CLASSES, seed=0)
    load(tmp_path / "half.pt", sha256=halved)  # as it lies in its file, though the model holds it in float32


def test_timms_weights_that_do_not_exist_or_do_not_fit_are_refused() -> None:
    pytest.importorskip("timm")
    assert "did you mean c3_in1k?" in refusal("c3_in1", "timm/resnet10t")
    assert "has 1000 classes, none of them 'cat', and the data has 4" in refusal("c3_in1k", "timm/resnet10t")
    assert "has 1000 classes, none of them 'cat', and the data has 4" in refusal("DEFAULT", "timm/resnet10t")
    assert "has no weights 'DEFAULT'; give a file's path" in refusal("DEFAULT", "timm/botnet50ts_256")


@pytest.mark.parametrize(("name", "weights"), [("resnet18", "IMAGENET1K_V1"), ("timm/resnet10t", "c3_in1k")])
def test_a_download_that_fails_is_one_line(name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("timm/"):
        pytest.importorskip("timm")
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # its setting against minutes of retries
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # a port where nothing listens
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    before = torch.get_rng_state()
    assert "could not be loaded" in refusal(weights, name, **THOUSAND, image_size=224)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda tensor: tensor * math.nan, "has non-finite values in 'head.weight'"),
        (lambda tensor: tensor.to_sparse(), "has 'head.weight', a tensor of torch.sparse_coo"),
        (lambda tensor: tensor.to("meta"), "has 'head.weight', a tensor without values"),
        (lambda tensor: tensor.to(torch.complex64), "and torch.complex64, where a dense real one was expected"),
        (lambda tensor: (50 * tensor).to(torch.int8), "has 'head.weight' quantized to int8: give the weights from which it was"),
    ],
)
def test_a_tensor_that_no_teacher_can_have_is_refused(spoil: Callable[[Tensor], Tensor], says: str, tmp_path: Path) -> None:
    state = dict(convnet().state_dict())
    state["head.weight"] = spoil(state["head.weight"])
    torch.save(state, tmp_path / "teacher.pth")
    assert says in refusal(tmp_path / "teacher.pth")


def features_of(weights: Path, **changes: Any) -> tuple[nn.Module, list[str]]:
    """What a teacher gives whose logits no method reads, and what is said of it."""
    lines: list[str] = []
    with notices_to(lines.append):
        return load(weights, logits=False, **changes), lines


@pytest.mark.parametrize("kind", ["checkpoint", "state dict", "headless"])
def test_a_model_of_other_classes_gives_its_features_where_no_method_reads_logits(tmp_path: Path, kind: str) -> None:
    model, path = convnet(num_classes=7).eval(), tmp_path / "x.safetensors"
    if kind == "checkpoint":
        write_checkpoint(path, model, num_classes=7, classes=list("abcdefg"))
    else:
        state = {name: tensor for name, tensor in model.state_dict().items() if kind != "headless" or "head" not in name}
        save_file(state, path)
    teacher, lines = features_of(path)
    assert not has_classifier(teacher)
    assert len(lines) == 1
    assert lines[0].endswith(": only its features are used")
    images = torch.randn(2, 3, 8, 8)
    model.set_submodule("head", nn.Identity())
    torch.testing.assert_close(teacher(images), model(images), rtol=0, atol=0)
    assert ": choose weights" in refusal(path)
    own, lines = features_of(path, classes=tuple("abcdefg"))  # the data's are those of the checkpoint
    assert has_classifier(own) == (kind != "headless")
    assert bool(lines) == (kind == "headless")
    teacher, lines = features_of(path, classes=())
    assert not has_classifier(teacher)
    assert "the data has 1" not in lines[0]


def test_a_student_begins_with_weights_and_a_classifier_of_its_own_where_its_classes_are_others(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", convnet(num_classes=4))
    fit: dict[str, Any] = {"image_size": 8, "seed": 0, "weights_key": None}
    same, student = convnet(seed=9), convnet(seed=9)
    begin_with(same, "convnet_small", str(path), classes=CLASSES, **fit)
    assert_same(same, convnet())
    begin_with(student, "convnet_small", str(path), classes=("x", "y", "z", "w"), **fit)
    torch.testing.assert_close(student.get_parameter("features.0.weight"), convnet().get_parameter("features.0.weight"))
    assert_same(classifier(student), classifier(convnet(seed=9)))


def test_a_checkpoint_says_with_which_arguments_its_model_was_built(tmp_path: Path) -> None:
    name = "convnet_small(widths=[4, 8, 12])"
    model = build_model(name, num_classes=4, image_size=8, seed=1)
    path = write_checkpoint(tmp_path / "x.safetensors", model, model=name)
    assert_same(load(path), model)
    assert_same(load(path, "convnet_small(widths=[4,8,12])"), model)
    with pytest.raises(CheckpointError, match=r"belong to a convnet_small with other arguments \(features\.0\.weight"):
        begin_with(convnet(), "convnet_small", str(path), image_size=8, classes=CLASSES, seed=0, weights_key=None)
    assert "is a convnet_small(widths=[4, 8, 12]), not a convnet_small(widths=[4, 8, 9])" in refusal(
        path, "convnet_small(widths=[4, 8, 9])"
    )


@pytest.mark.parametrize(
    "extra",
    [
        {"classes": ["d", "c", "b", "a"]},
        {"class_to_idx": {"a": 3, "b": 2, "c": 1, "d": 0}},
        {"meta": {"CLASSES": ("d", "c", "b", "a")}},
        {"meta": {"dataset_meta": {"classes": ("d", "c", "b", "a")}}},
        {"hyper_parameters": {"id2label": {"0": "d", "1": "c", "2": "b", "3": "a"}}},
        {"idx_to_class": {0: "d", 1: "c", 2: "b", 3: "a"}, "classes": ["d", "c", "b", "a"]},
    ],
)
def test_class_names_recorded_with_a_state_dict_are_those_of_its_classifiers_rows(extra: dict[str, Any], tmp_path: Path) -> None:
    written = convnet()
    torch.save({"state_dict": written.state_dict(), "names": ["a", "b", "c"], "epoch": 3, **extra}, tmp_path / "model.pth")
    lines: list[str] = []
    with notices_to(lines.append):
        model = load(tmp_path / "model.pth", classes=("a", "b", "c", "d"))
        images_BCHW = torch.rand(2, 3, 8, 8)
        assert torch.equal(model(images_BCHW), written.eval()(images_BCHW).flip(1))
        assert load(tmp_path / "model.pth", classes=("b", "d"))(images_BCHW).shape == (2, 2)
    assert f"weights {tmp_path / 'model.pth'}: 4 of its 4 classes are used, by name, in the order of the data's" in lines


def test_a_file_without_class_names_is_said_to_be_matched_by_order_and_two_orders_are_refused(tmp_path: Path) -> None:
    lines: list[str] = []
    torch.save(convnet().state_dict(), tmp_path / "bare.pth")
    with notices_to(lines.append):
        load(tmp_path / "bare.pth", classes=("a", "b", "c", "d"))
    assert lines == [f"weights {tmp_path / 'bare.pth'}: they record no usable class names; label 0 is taken for 'a', and so on"]
    orders = {"classes": ["a", "b", "c", "d"], "meta": {"CLASSES": ["d", "c", "b", "a"]}}
    torch.save({"model": convnet().state_dict(), **orders}, tmp_path / "both.pth")
    assert "has its classes in two orders, in classes and meta.CLASSES" in refusal(tmp_path / "both.pth")


def test_class_names_in_other_places_of_a_file_are_not_its_classifiers(tmp_path: Path) -> None:
    state = convnet().state_dict()
    conv_rows = next(len(tensor) for tensor in state.values() if tensor.ndim == 4)
    extra = {
        "hyper_parameters": {"names": [f"tap{number}" for number in range(conv_rows)]},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(conv_rows, 3, 3, 3)}}},
    }
    torch.save({"state_dict": state, **extra}, tmp_path / "model.pth")
    assert load(tmp_path / "model.pth", classes=("a", "b", "c", "d"))(torch.rand(1, 3, 8, 8)).shape == (1, 4)


def test_ids_and_names_of_the_same_classes_are_synonyms_and_labels_may_begin_at_1(tmp_path: Path) -> None:
    written, images_BCHW = convnet().eval(), torch.rand(2, 3, 8, 8)
    ids = {"n00000009": 1, "n00000008": 2, "n00000007": 3, "n00000006": 4}
    torch.save({"model": written.state_dict(), "class_to_idx": ids, "classes": ["ox", "ant", "cat", "dog"]}, tmp_path / "m.pth")
    for classes in (("dog", "cat", "ant", "ox"), tuple(sorted(ids))):
        assert torch.equal(load(tmp_path / "m.pth", classes=classes)(images_BCHW), written(images_BCHW).flip(1))


def test_a_file_whose_dictionaries_refer_to_each_other_is_read_in_time(tmp_path: Path) -> None:
    shared: dict[str, Any] = {}
    for _ in range(4):
        shared = {f"key{number}": shared for number in range(40)}
    torch.save({"model": convnet().state_dict(), "about": shared}, tmp_path / "m.pth")
    began = time.process_time()
    load(tmp_path / "m.pth")
    assert time.process_time() - began < 2
