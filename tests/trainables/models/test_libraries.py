"""Every torchvision classifier, and one of each of timm's families, is built, answers with logits, and tells its points."""

import contextlib

import pytest
import torch
from torch import nn

from trainables.errors import ModelError
from trainables.models.libraries.interface import registered
from trainables.models.registry import check_forward, construct
from trainables.models.tap_names import list_taps
from trainables.models.taps import Taps

pytestmark = pytest.mark.slow


def built(name: str, image_size: int) -> nn.Module:
    """On the meta device, where a model may weigh nothing; on the CPU where its own constructor looks at values."""
    with contextlib.suppress(ModelError), torch.device("meta"):
        return construct(name, num_classes=10, image_size=image_size, seed=0)
    return construct(name, num_classes=10, image_size=image_size, seed=0)


def assert_usable(name: str, image_size: int) -> None:
    model = built(name, image_size)
    check_forward(model, image_size, 10, name=name)
    found = [point.name for point in list_taps(model, image_size)]
    taps = Taps(model, found, name=name, image_size=image_size)
    assert len(taps.shapes) == len(found)
    assert all(size > 0 for shape in taps.shapes for size in shape)


@pytest.mark.parametrize("name", registered("torchvision"))
def test_every_classifier_of_torchvision_can_be_used(name: str) -> None:
    assert_usable(name, 299 if name == "inception_v3" else 224)


def test_a_classifier_of_each_family_of_timm_can_be_used() -> None:
    timm = pytest.importorskip("timm")
    known, broken = registered("timm"), []
    for family in timm.list_modules():
        name = min((name for name in timm.list_models(module=family) if name in known), key=len, default=None)
        if name is None:
            continue
        size = timm.get_pretrained_cfg(name).input_size[-1]
        try:
            assert_usable(f"timm/{name}", 192 if name == "test_vit" else size)
        except (AssertionError, ModelError) as error:
            broken.append(f"{name}: {error}")
    assert not broken
