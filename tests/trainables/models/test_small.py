from collections.abc import Iterator

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainables.models.registry import build_model


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine cost these small convolutions more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digits_top1_pct(name: str, *, epochs: int) -> float:
    """Top-1 on the last 360 digits after plain SGD on the first 1437."""
    digits = load_digits()
    images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)
    model = build_model(name, num_classes=10, image_size=8, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(1437, generator=order).split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        hits: torch.Tensor = model.eval()(images[1437:]).argmax(1) == labels[1437:]
    return 100 * hits.double().mean().item()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["convnet", "mlp"])
def test_the_large_model_learns_digits_better_than_the_small_one(family: str) -> None:
    small, large = (digits_top1_pct(f"{family}_{size}", epochs=2) for size in ("small", "large"))
    assert large > small > 60


@pytest.mark.parametrize("name", ["mlp_small", "mlp_large"])
def test_a_samples_gradient_in_an_mlp_does_not_depend_on_its_batch(name: str) -> None:
    model = build_model(name, num_classes=4, image_size=8, seed=0).double()
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    images = torch.rand(5, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(5) % 4

    def gradients(chosen: slice) -> list[torch.Tensor]:
        loss = cross_entropy(model(images[chosen]), labels[chosen], reduction="sum")
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for whole, first, rest in zip(gradients(slice(0, 5)), gradients(slice(0, 2)), gradients(slice(2, 5)), strict=True):
        torch.testing.assert_close(whole, first + rest, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["convnet_small", "convnet_large"])
def test_convnets_normalize_by_batch(name: str) -> None:
    model = build_model(name, num_classes=4, image_size=8, seed=0)
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
