"""A teacher whose weights are rounded once, or that has a precision of its own, answers as under autocast."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.launches import Launches
from tests.trainables.jobs import config, write_teacher
from tests.trainables.models.small_families import SMALL, small
from trainables.distributed.group import Group
from trainables.engine.teacher_placement import round_weights
from trainables.engine.train import build
from trainables.models.forward import logits_and_aux
from trainables.models.registry import build_model
from trainables.teachers.network import TeacherNetwork, load_networks, row_network
from trainables.teachers.rows import RowFormat

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


@pytest.mark.parametrize(("precision", "own"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "auto")])
def test_a_teacher_of_its_own_precision_answers_as_under_autocast_of_that_one_in_a_worker_and_in_rows(
    tmp_path: Path, precision: str, own: str
) -> None:
    weights = write_teacher(tmp_path / "t.safetensors", "convnet_large")
    teacher = {"model": "convnet_large", "weights": weights, "precision": own}
    settings = config(tmp_path, model="convnet_small", teacher=teacher, precision=precision, data={"mean": [0.5] * 3})
    classes, pixels = tuple(str(label) for label in range(10)), images(8, torch.float32)
    (plain,) = load_networks(settings, classes)
    with torch.autocast("cpu", torch.bfloat16, enabled=own == "bf16"):
        expected = plain(pixels).float()
    with contextlib.closing(build(settings, Group(), lambda *_: None, lambda whole=False: {})) as job:
        rows = row_network(job.config, torch.device("cpu"), classes, RowFormat(10, None))
        with job.train_state.autocast():
            for network in (job.train_state.teacher, rows):
                assert isinstance(network, TeacherNetwork)
                (found,) = network(pixels, 2).values()
                torch.testing.assert_close(found.logits_BK, expected, rtol=1e-5, atol=1e-5)  # channels_last sums in another order
        assert job.train_state.teacher.networks[0].head.weight.dtype == (torch.bfloat16 if own == "bf16" else torch.float32)
