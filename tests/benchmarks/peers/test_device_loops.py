"""The peers learn what a plain step learns: they differ in what they do besides, and in their settings."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks.peers.device_loops import normalized, repdistiller_step, torchdistill_step, torchvision_step
from tests.benchmarks.plain import kd_loss
from trainables.models.registry import build_model

Step = Callable[[nn.Module, nn.Module, Tensor, Tensor], Callable[[], None]]


def torchvision_fp32(teacher: nn.Module, student: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Callable[[], None]:
    return torchvision_step(teacher, student, images_BCHW, labels_B, "fp32")


@pytest.mark.parametrize(
    ("peer", "lr", "weight_decay"),
    [(torchvision_fp32, 0.01, 1e-4), (torchdistill_step, 0.1, 1e-4), (repdistiller_step, 0.05, 5e-4)],
)
def test_a_peers_three_steps_are_those_of_plain_distillation(peer: Step, lr: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    images_BCHW = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels_B = torch.randint(10, (6,), generator=generator)
    teacher, student, expected = (
        build_model(name, num_classes=10, image_size=8, seed=0) for name in ("convnet_large", "convnet_small", "convnet_small")
    )
    teacher.eval().requires_grad_(False)
    step = peer(teacher, student.train(), images_BCHW, labels_B)
    optimizer = torch.optim.SGD(expected.train().parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)
    images = normalized(images_BCHW)
    for _ in range(3):
        step()
        optimizer.zero_grad()
        kd_loss(expected(images), teacher(images), labels_B).backward()
        optimizer.step()
    for found, wanted in zip(student.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted)
