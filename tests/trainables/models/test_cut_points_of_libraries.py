"""How many cut points every torchvision classifier has, one of each of timm's families, and our own models."""

import contextlib

import pytest

from tests.trainables.models.test_libraries import built
from trainables.errors import ModelError
from trainables.models.cut_points import cut_points
from trainables.models.libraries.interface import registered
from trainables.models.libraries.ours import MODELS
from trainables.models.registry import construct

pytestmark = pytest.mark.slow

LEAST = 10
FEW = {
    *("coat", "deepseek_vit", "gemma4_vit", "mvitv2", "nasnet", "nest", "pit", "pnasnet", "qwen3_vit", "tnt", "twins", "xcit"),
    *("crossvit", "vision_transformer_sam"),
}
"""Families of timm whose blocks pass several values on, tensors or heights and widths; two whose forward branches on values."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each family of timm that has a model; none where timm is not installed."""
    if "timm_family" not in metafunc.fixturenames:
        return
    families: list[str] = []
    with contextlib.suppress(ImportError):
        import timm

        # The shortest name of vision_transformer is a test model of any image size: see test_graph.
        families = [each for each in timm.list_modules() if each != "vision_transformer" and timm.list_models(module=each)]
    metafunc.parametrize("timm_family", families)


def _count(name: str, image_size: int) -> int:
    try:
        return len(cut_points(built(name, image_size), image_size))
    except ModelError:
        return 0


@pytest.mark.parametrize("name", registered("torchvision"))
def test_every_classifier_of_torchvision_can_be_cut(name: str) -> None:
    assert _count(name, 299 if name == "inception_v3" else 224) >= LEAST


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_of_ours_can_be_cut(name: str) -> None:
    assert cut_points(construct(name, num_classes=10, image_size=32, seed=0), 32)


def test_a_classifier_of_each_family_of_timm_can_be_cut(timm_family: str) -> None:
    import timm

    name = min(timm.list_models(module=timm_family), key=len)
    enough = _count(f"timm/{name}", timm.get_pretrained_cfg(name).input_size[-1]) >= LEAST
    assert enough == (timm_family not in FEW)
