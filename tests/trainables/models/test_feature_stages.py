"""Stages of the families of models, as the papers that distil them count."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainables.models.small_families import unchanged
from trainables.models.tap_names import list_taps


@cache
def named(name: str, image_size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of each point of a model: where it is, and its shape."""
    found = list_taps(unchanged(name, image_size), image_size)
    return {each: (point.aliases[-1], point.shape) for point in found for each in (point.name, *point.aliases)}


@pytest.mark.parametrize(
    ("name", "image_size", "stem", "stages"),
    [
        ("resnet8", 32, (16, 32, 32), ["layer1", "layer2", "layer3"]),
        ("resnet8x4", 32, (32, 32, 32), ["layer1", "layer2", "layer3"]),
        ("wrn_16_1", 32, (16, 32, 32), ["layer1", "layer2", "layer3"]),
        ("vgg13_cifar", 32, (64, 32, 32), ["layer1", "layer2", "layer3", "layer4"]),  # said by the model
        ("mobilenetv2_half_cifar", 32, (16, 16, 16), ["layer1", "layer2", "layer3", "layer4"]),
        ("shufflenetv1_cifar", 32, (24, 32, 32), ["layer1", "layer2", "layer3"]),
        ("shufflenetv2_cifar", 32, (24, 32, 32), ["layer1", "layer2", "layer3"]),
        pytest.param("resnet50_cifar", 32, (64, 32, 32), ["layer1", "layer2", "layer3", "layer4"], marks=pytest.mark.slow),
        ("convnet_small", 8, (8, 8, 8), ["features.2", "features.6", "features"]),
        ("resnet18", 64, (64, 16, 16), ["layer1", "layer2", "layer3", "layer4"]),
        ("vgg11_bn", 32, (64, 32, 32), ["features.2", "features.6", "features.13", "features.20", "features.27"]),
        ("alexnet", 224, (64, 55, 55), ["features.1", "features.4", "features.11"]),
        ("mobilenet_v2", 64, (32, 32, 32), ["features.1", "features.3", "features.6", "features.13", "features.17"]),
        ("mobilenet_v3_small", 64, (16, 32, 32), ["features.1", "features.3", "features.8", "features.11"]),
        pytest.param(
            "efficientnet_b0",
            64,
            (32, 32, 32),
            ["features.1", "features.2", "features.3", "features.5", "features.7"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "convnext_tiny", 64, (96, 16, 16), ["features.1", "features.3", "features.5", "features"], marks=pytest.mark.slow
        ),
        pytest.param(
            "densenet121", 64, (64, 16, 16), [f"features.denseblock{number}" for number in (1, 2, 3, 4)], marks=pytest.mark.slow
        ),
        ("shufflenet_v2_x0_5", 64, (24, 16, 16), ["stage2.3", "stage3.7", "stage4.3"]),
        ("googlenet", 64, (192, 8, 8), ["inception3b", "inception4e", "inception5b"]),
        pytest.param("inception_v3", 128, (192, 13, 13), ["Mixed_5d", "Mixed_6e", "Mixed_7c"], marks=pytest.mark.slow),
        ("mnasnet0_5", 64, (8, 32, 32), ["layers.8", "layers.9", "layers.11", "layers.13"]),
        ("squeezenet1_1", 64, (64, 15, 15), ["features.4", "features.7", "features"]),
        pytest.param(
            "regnet_y_400mf",
            64,
            (32, 32, 32),
            [*(f"trunk_output.block{number}" for number in (1, 2, 3)), "trunk_output"],
            marks=pytest.mark.slow,
        ),
        ("convnext", 64, (8, 16, 16), ["features.1", "features"]),
        ("densenet", 64, (16, 16, 16), [f"features.denseblock{number}" for number in (1, 2, 3, 4)]),
        ("swin", 32, (16, 8, 8), ["features.1", "features.3", "features.5", "features"]),
        pytest.param("swin_t", 64, (96, 16, 16), ["features.1", "features.3", "features.5", "features"], marks=pytest.mark.slow),
        pytest.param("maxvit_t", 224, (64, 112, 112), ["blocks.0", "blocks.1", "blocks.2", "blocks.3"], marks=pytest.mark.slow),
    ],
)
def test_a_stage_is_the_last_block_of_each_resolution(
    name: str, image_size: int, stem: tuple[int, ...], stages: list[str]
) -> None:
    found = named(name, image_size)
    assert found["stem"][1] == stem
    for number, module in enumerate(stages, start=1):
        assert found[module] == found[f"stage{number}"]
    assert f"stage{len(stages) + 1}" not in found
    shapes = [found[f"stage{number}"][1] for number in range(1, len(stages) + 1)]
    assert all(len(shape) == 3 and shape[1] == shape[2] for shape in shapes)
    assert shapes == sorted(shapes, key=lambda shape: -shape[1])


@pytest.mark.parametrize(
    ("name", "stem", "stages"),
    [
        ("timm/resnet10t", "maxpool", ["layer1", "layer2", "layer3", "layer4"]),
        ("timm/convnext_atto", "stem", ["stages.0", "stages.1", "stages.2", "stages"]),
        ("timm/vgg11_bn", "features.2", ["features.2", "features.6", "features.13", "features.20", "features.27"]),
        ("timm/regnety_002", "stem", ["s1", "s2", "s3", "s4"]),
    ],
)
def test_timms_models_have_the_same_stages(name: str, stem: str, stages: list[str]) -> None:
    pytest.importorskip("timm")
    found = named(name, 64)
    assert found[stem] == found["stem"]
    for number, module in enumerate(stages, start=1):
        assert found[module] == found[f"stage{number}"]
    assert f"stage{len(stages) + 1}" not in found


def test_maps_that_swin_holds_channels_last_are_handed_out_channels_first() -> None:
    found = named("swin", 32)
    assert [found[f"stage{number}"][1] for number in (1, 2, 3, 4)] == [(16, 8, 8), (32, 4, 4), (64, 2, 2), (128, 1, 1)]


def test_a_map_of_as_many_channels_as_pixels_is_read_as_the_models_other_maps_are() -> None:
    assert named("swin", 64)["stage1"][1] == (16, 16, 16)
    assert named("convnet_small", 8)["stage1"][1] == (8, 8, 8)


def test_models_of_tokens_and_of_vectors_have_pooled_features_and_no_stages() -> None:
    for name in ("vit", "mlp_small"):
        assert [point.name for point in list_taps(unchanged(name, 64), 64)] == ["pooled"]


@pytest.mark.parametrize(
    ("name", "stage1", "last"),
    [
        ("resnet8", "layer1.0.relu2:in", "layer3.0.relu2:in"),
        ("wrn_16_1", "layer2.0.bn1", "bn1"),
        ("vgg8_cifar", "layer1.1", "layer4.1"),
        ("shufflenetv1_cifar", "layer1.3.relu3:in", "layer3.3.relu3:in"),
        ("resnet18", "layer1.1.relu:in", "layer4.1.relu:in"),
        ("vgg11_bn", "features.1", "features.26"),
        ("convnet_small", "features.1", "features.9"),
        ("densenet", "features.transition1.norm", None),  # its last norm goes into a function
        ("mobilenet_v2", "features.1", "features.17"),  # linear bottlenecks: no activation to come before
        ("swin", "features.1", "features"),
    ],
)
def test_a_pre_activation_is_what_the_stages_activation_or_the_next_blocks_is_given(
    name: str, stage1: str, last: str | None
) -> None:
    found = named(name, 64)
    count = sum(1 for each in found if each.startswith("stage") and each[5:].isdigit())
    assert found[stage1] == found["stage1.preact"]
    assert found.get(f"stage{count}.preact") == (found[last] if last else None)


class PreActivation(nn.Module):
    """x + conv(relu(norm(x))), as in a wide ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.relu, self.conv = nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + self.conv(self.relu(self.norm(x_BCHW)))


class WithFunctions(nn.Module):
    """Two resolutions of one pre-activation block each; everything else in forward is functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.second = PreActivation(4), nn.Conv2d(4, 4, 2, stride=2), PreActivation(4)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.second(self.down(self.first(self.conv(images_BCHW).relu())))
        return self.head(F.relu(self.norm(x_BCHW)).mean((2, 3)))


def test_a_norm_and_an_activation_after_the_last_block_are_no_part_of_its_stage() -> None:
    found = {point.name: point.aliases for point in list_taps(WithFunctions(), 8)}
    assert found == {
        "stem": ("first:in",),
        "stage1": ("stage1.preact", "first"),
        "stage2": ("second",),
        "stage2.preact": ("unpooled", "norm"),
        "pooled": ("head:in",),
    }


class Chain(nn.Module):
    """VGG with activations as functions between blocks, as RepDistiller has it."""

    def __init__(self) -> None:
        super().__init__()
        self.block0 = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.pool0 = nn.MaxPool2d(2)
        self.block1 = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.pool1 = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 5)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.pool0(F.relu(self.block0(images_BCHW)))
        return self.head(self.pool1(torch.relu(self.block1(x_BCHW))).flatten(1))


def test_what_a_function_makes_of_a_blocks_output_is_read_as_the_next_modules_input() -> None:
    found = {point.name: point.aliases for point in list_taps(Chain(), 8)}
    assert found["stage1"] == ("stem", "pool0:in")
    assert "pool1:in" in found["stage2"]
    assert found["stage1.preact"] == ("block0", "block0.1")
    assert found["stage2.preact"] == ("block1", "block1.1")
