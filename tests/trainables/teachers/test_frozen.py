"""A frozen teacher with folded batch norms answers as before, to rounding, and no more wrongly in half precision."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launches import Launches
from tests.trainables.jobs import config, write_teacher
from tests.trainables.models.small_families import SMALL, small
from trainables.distributed.group import Group
from trainables.engine.train import build
from trainables.methods.tap_reader import TapReader
from trainables.models.forward import logits_and_aux
from trainables.models.registry import build_model
from trainables.models.tap_names import list_taps
from trainables.teachers.frozen import fold_batch_norms, round_weights
from trainables.teachers.network import TeacherNetwork, load_networks, row_network
from trainables.teachers.rows import HalfLogits

CLASSES = 7


def trained(name: str, image_size: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A frozen model whose batch norms have statistics and weights as of a training."""
    built = small(name, image_size) if name in SMALL else build_model(name, num_classes=CLASSES, image_size=image_size, seed=1)
    model = built.to(dtype)
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor, low in (
                (module.weight, 0.5),
                (module.bias, -0.2),
                (module.running_mean, -0.3),
                (module.running_var, 0.4),
            ):
                tensor.data.uniform_(low, low + 0.7, generator=generator)
        elif isinstance(module, nn.Linear) and not module.weight.any():  # ViT's classifier begins at zero
            module.weight.data.uniform_(-0.1, 0.1, generator=generator)
    return model.eval().requires_grad_(False)


def images(image_size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(3), dtype=dtype)


def num_batch_norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "image_size", "folded"),
    [
        ("resnet8", 16, 9),
        ("resnet56", 16, 57),
        ("vgg8_cifar", 32, 5),
        ("wrn_16_1", 16, 6),
        ("mobilenetv2_half_cifar", 32, 53),
        ("shufflenetv1_cifar", 32, None),
        ("convnet_small", 8, None),
        ("resnet18", 32, 20),
        ("mobilenet_v2", 32, 52),
        ("mobilenet_v3_small", 32, 34),
        ("densenet", 32, 9),
        pytest.param("densenet121", 32, 59, marks=pytest.mark.slow),
        ("vit", 32, 0),
    ],
)
def test_folding_changes_a_models_answers_by_rounding_alone(name: str, image_size: int, folded: int | None) -> None:
    model = trained(name, image_size)
    inputs = images(image_size)
    expected = logits_and_aux(model(inputs))[0]
    num_norms = num_batch_norms(model)
    count = fold_batch_norms(model)
    assert folded is None or count == folded
    assert num_batch_norms(model) == num_norms - count
    found = logits_and_aux(model(inputs))[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-9


def test_every_tap_reads_what_it_read_before() -> None:
    whole = trained("resnet8", 16)
    taps = [tap.name for tap in list_taps(whole, 16, every=True)]
    for name in [tap for tap in taps if "." not in tap or tap.startswith(("layer2.", "stage2."))]:
        model = copy.deepcopy(whole)
        reader = TapReader(model, {"one": [name]}, name="resnet8", image_size=16)
        teacher = TeacherNetwork([model], [reader])
        before = teacher(images(16), 2)["one"].features[0].clone()
        assert fold_batch_norms(model, reader.modules) >= 7
        after = teacher(images(16), 2)["one"].features[0]
        assert float((after - before).abs().max() / before.abs().max().clamp(min=1e-9)) < 1e-9, name


def test_weights_rounded_once_give_the_bits_of_autocast() -> None:
    for name, size in (("resnet8", 16), ("vit", 32), ("mobilenet_v3_small", 32)):
        model = trained(name, size, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            expected = logits_and_aux(model(images(size, torch.float32)))[0]
            with Launches() as before:
                model(images(size, torch.float32))
            round_weights(model, torch.bfloat16)
            with Launches() as after:
                found = logits_and_aux(model(images(size, torch.float32)))[0]
        assert torch.equal(found, expected), name
        assert after.total < before.total


@pytest.mark.parametrize(("name", "image_size"), [("resnet20", 16), ("resnet18", 32)])
def test_in_half_precision_a_folded_teacher_is_no_further_from_the_exact_one(name: str, image_size: int) -> None:
    exact = trained(name, image_size)
    inputs = torch.randn(8, 3, image_size, image_size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    truth = exact(inputs)
    plain, folded = copy.deepcopy(exact).float(), copy.deepcopy(exact).float()
    fold_batch_norms(folded)
    round_weights(folded, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        errors = [float((model(inputs.float()).double() - truth).norm() / truth.norm()) for model in (plain, folded)]
    assert errors[1] < 1.25 * errors[0]


@pytest.mark.parametrize(
    ("sections", "folds"),
    [
        ({"precision": "bf16"}, True),
        ({"precision": "fp32"}, False),
        ({"precision": "fp32", "teacher": {"fold_batch_norms": True}}, True),
        ({"precision": "bf16", "teacher": {"fold_batch_norms": False}}, False),
        ({"precision": "bf16", "distill": {"method": ["srrl"], "options": {}}}, False),
    ],
    ids=["bf16", "fp32", "fp32, as the experiment says", "bf16, as the experiment says", "a method that has a part of it"],
)
def test_a_job_folds_its_teacher_where_rounding_is_that_of_half_precision(
    tmp_path: Path, sections: dict[str, Any], folds: bool
) -> None:
    weights = write_teacher(tmp_path / "t.safetensors", "convnet_large")
    models = {"model": "convnet_small", "teacher": {"model": "convnet_large", "weights": weights, **sections.pop("teacher", {})}}
    job = build(config(tmp_path, **models, **sections), Group(), lambda *_: None, lambda whole=False: {})
    teacher = job.train_state.teacher
    assert isinstance(teacher, TeacherNetwork)
    assert any(isinstance(module, nn.Identity) for module in teacher.networks[0].modules()) == folds
    job.close()


@pytest.mark.parametrize(("precision", "own"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "auto")])
def test_a_teacher_of_its_own_precision_answers_as_under_autocast_of_that_one_in_a_worker_and_in_rows(
    tmp_path: Path, precision: str, own: str
) -> None:
    weights = write_teacher(tmp_path / "t.safetensors", "convnet_large")
    teacher = {"model": "convnet_large", "weights": weights, "precision": own, "fold_batch_norms": False}
    settings = config(tmp_path, model="convnet_small", teacher=teacher, precision=precision, data={"mean": [0.5] * 3})
    classes, pixels = tuple(str(label) for label in range(10)), images(8, torch.float32)
    (plain,) = load_networks(settings, classes)
    with torch.autocast("cpu", torch.bfloat16, enabled=own == "bf16"):
        expected = plain(pixels).float()
    with contextlib.closing(build(settings, Group(), lambda *_: None, lambda whole=False: {})) as job:
        rows = row_network(job.config, torch.device("cpu"), classes, HalfLogits(10, None))
        with job.train_state.autocast():
            for network in (job.train_state.teacher, rows):
                assert isinstance(network, TeacherNetwork)
                (found,) = network(pixels, 2).values()
                torch.testing.assert_close(found.logits_BK, expected, rtol=1e-5, atol=1e-5)  # channels_last sums in another order
        assert job.train_state.teacher.networks[0].head.weight.dtype == (torch.bfloat16 if own == "bf16" else torch.float32)
