import pytest
import torch
from torch import nn

from trainables.models.cifar.resnet import BasicBlock, CifarResNet
from trainables.models.libraries.ours import MODELS


def shapes_only(name: str, num_classes: int = 10) -> CifarResNet:
    with torch.device("meta"):
        return CifarResNet(num_classes, **MODELS[name].options)


def num_parameters(name: str, num_classes: int) -> int:
    return sum(p.numel() for p in shapes_only(name, num_classes).parameters())


@pytest.mark.parametrize(("depth", "published_m"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_parameters_are_those_of_he_2015_table_6_and_the_projection_shortcuts(depth: int, published_m: float) -> None:
    """Table 6 counts CIFAR-10 models whose shortcuts have no parameters."""
    model = shapes_only(f"resnet{depth}")
    shortcuts = [module.downsample for module in model.modules() if isinstance(module, BasicBlock)]
    assert sum(isinstance(shortcut, nn.Sequential) for shortcut in shortcuts) == 2
    in_shortcuts = sum(p.numel() for shortcut in shortcuts for p in shortcut.parameters())
    assert in_shortcuts == 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64
    count_m = (num_parameters(f"resnet{depth}", 10) - in_shortcuts) / 1e6
    assert round(count_m, 1 if depth == 110 else 2) == published_m


@pytest.mark.parametrize(
    ("name", "published_m"),
    [
        ("resnet8", 0.08),
        ("resnet14", 0.18),
        ("resnet20", 0.28),
        ("resnet32", 0.47),
        ("resnet56", 0.86),
        ("resnet110", 1.74),
        ("resnet8x4", 1.23),
        ("resnet32x4", 7.43),
    ],
)
def test_parameters_for_cifar_100_are_those_that_distillation_papers_give(name: str, published_m: float) -> None:
    """RepDistiller's models at 100 classes, in millions, as the papers that compare on them print them."""
    assert round(num_parameters(name, 100) / 1e6, 2) == published_m


def test_depth_counts_the_weighted_layers_on_the_path() -> None:
    for name, depth in (("resnet8", 8), ("resnet14", 14), ("resnet110", 110), ("resnet32x4", 32)):
        model = shapes_only(name)
        on_path = [key for key, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "downsample" not in key]
        assert len(on_path) == depth


def test_parameter_names_are_repdistillers() -> None:
    names = set(shapes_only("resnet8x4").state_dict())
    expected = {
        "conv1.weight",
        "bn1.running_var",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.bias",
        "layer2.0.conv2.weight",
    }
    assert expected | {"layer3.0.bn2.num_batches_tracked", "fc.weight", "fc.bias"} <= names
    assert {name.split(".")[0] for name in names} == {"conv1", "bn1", "layer1", "layer2", "layer3", "fc"}


def test_maps_are_32_16_and_8_pixels() -> None:
    model = shapes_only("resnet8")
    sizes: list[tuple[int, ...]] = []
    for stage in (model.layer1, model.layer2, model.layer3):
        assert isinstance(stage, nn.Sequential)
        stage.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape[1:])))
    model(torch.zeros(2, 3, 32, 32, device="meta"))
    assert sizes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_a_depth_that_is_not_6n_plus_2_is_refused() -> None:
    with pytest.raises(ValueError, match="6n"):
        CifarResNet(10, depth=18)
