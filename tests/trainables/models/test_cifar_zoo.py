"""Our CIFAR models are the published ones: parameters, operations, shapes, outputs, and what a tap reads."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.trainables.models.published import PUBLISHED, Net
from trainables.models.libraries.ours import MODELS
from trainables.models.registry import construct
from trainables.models.weights import load_teacher

CLASSES = tuple(str(label) for label in range(100))

Shape = tuple[int, int, int]
NARROW: tuple[Shape, ...] = ((16, 32, 32), (32, 16, 16), (64, 8, 8))
WIDE: tuple[Shape, ...] = ((64, 32, 32), (128, 16, 16), (256, 8, 8))
VGG: tuple[Shape, ...] = ((128, 16, 16), (256, 8, 8), (512, 4, 4), (512, 4, 4))
ZOO: dict[str, tuple[int, tuple[Shape, ...]]] = {
    "resnet8": (83_892, NARROW),
    "resnet14": (181_108, NARROW),
    "resnet20": (278_324, NARROW),
    "resnet32": (472_756, NARROW),
    "resnet44": (667_188, NARROW),
    "resnet56": (861_620, NARROW),
    "resnet110": (1_736_564, NARROW),
    "resnet8x4": (1_233_540, WIDE),
    "resnet32x4": (7_433_860, WIDE),
    "wrn_16_1": (180_916, NARROW),
    "wrn_16_2": (703_284, ((32, 32, 32), (64, 16, 16), (128, 8, 8))),
    "wrn_40_1": (569_780, NARROW),
    "wrn_40_2": (2_255_156, ((32, 32, 32), (64, 16, 16), (128, 8, 8))),
    "resnet50_cifar": (23_705_252, ((256, 32, 32), (512, 16, 16), (1024, 8, 8), (2048, 4, 4))),
    "vgg8_cifar": (3_965_028, VGG),
    "vgg11_cifar": (9_277_284, VGG),
    "vgg13_cifar": (9_462_180, VGG),
    "vgg16_cifar": (14_774_436, VGG),
    "vgg19_cifar": (20_086_692, VGG),
    "mobilenetv2_half_cifar": (812_836, ((12, 16, 16), (16, 8, 8), (48, 4, 4), (160, 2, 2))),
    "shufflenetv1_cifar": (949_258, ((240, 16, 16), (480, 8, 8), (960, 4, 4))),
    "shufflenetv2_cifar": (1_355_528, ((116, 16, 16), (232, 8, 8), (464, 4, 4))),
}
"""Parameters with 100 classes and the stages' outputs at 32 pixels, as RepDistiller's modules have them."""


QUICK = {
    "resnet8",
    "resnet20",
    "resnet8x4",
    "wrn_16_1",
    "wrn_16_2",
    "vgg8_cifar",
    "mobilenetv2_half_cifar",
    "shufflenetv1_cifar",
    "shufflenetv2_cifar",
}
each_of_the_zoo = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ZOO]
)


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()


def stages(model: nn.Module) -> list[nn.Module]:
    """layer1, layer2, …, which every model of the zoo has. A VGG's layer0 is what RepDistiller takes for its stem."""
    return [module for name, module in model.named_children() if name.startswith("layer") and name != "layer0"]


def test_every_cifar_model_is_in_these_tables() -> None:
    zoo = {name for name, builder in MODELS.items() if builder.path.startswith("cifar.")}
    assert set(ZOO) == set(PUBLISHED) == zoo


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in {*QUICK, "resnet50_cifar"} else pytest.mark.slow) for name in ZOO]
)
def test_parameters_operations_and_shapes_are_the_published_ones(name: str) -> None:
    published = Net()
    PUBLISHED[name](published, images(1))
    num_parameters, shapes = ZOO[name]
    model = construct(name, num_classes=100, image_size=32, seed=0).eval()
    assert sum(p.numel() for p in model.parameters()) == published.num_parameters == num_parameters
    found_shapes: list[Shape] = []
    for stage in stages(model):
        stage.register_forward_hook(lambda module, inputs, output: found_shapes.append(tuple(output.shape[1:])))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert tuple(found_shapes) == shapes == tuple(tuple(stage.shape[1:]) for stage in published.stages)
    assert counter.get_total_flops() == published.flops


def before_the_last_activation(name: str, model: nn.Module) -> list[nn.Module]:
    """The activations whose inputs RepDistiller calls the stages' pre-activations; MobileNetV2's stages end without one."""
    if name.startswith("wrn"):
        return [model.get_submodule(path) for path in ("layer2.0.relu1", "layer3.0.relu1", "relu")]
    if name.startswith("mobilenet"):
        return []
    return [[module for module in stage.modules() if isinstance(module, nn.ReLU)][-1] for stage in stages(model)]


@each_of_the_zoo
def test_a_published_state_dict_loads_and_gives_the_published_logits_and_taps(name: str, tmp_path: Path) -> None:
    published = Net()
    with torch.no_grad():
        logits = PUBLISHED[name](published, images())
    path = tmp_path / "ckpt_epoch_240.pth"
    torch.save({"model": published.state, "epoch": 240, "best_acc": torch.tensor([70.0])}, path)
    model = load_teacher(name, str(path), image_size=32, classes=CLASSES, seed=0).double()
    path.unlink()  # up to 95 MB
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    for stage in stages(model):
        stage.register_forward_hook(lambda module, args, output: outputs.append(output))
    for activation in before_the_last_activation(name, model):
        activation.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    with torch.no_grad():
        torch.testing.assert_close(model(images()), logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(outputs, published.stages, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(inputs, published.preacts, rtol=1e-9, atol=1e-9)


@each_of_the_zoo
def test_every_activation_is_a_module_and_none_overwrites_its_input(name: str) -> None:
    model = construct(name, num_classes=10, image_size=32, seed=0)
    activations = [module for module in model.modules() if isinstance(module, nn.ReLU)]
    assert activations
    assert not any(activation.inplace for activation in activations)
    calls: list[nn.Module] = []
    for activation in activations:
        activation.register_forward_hook(lambda module, args, output: calls.append(module))
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, 32, 32))
    assert len(calls) == len(set(calls)) == len(activations)


def test_a_vgg_for_64_pixels_has_one_pool_more_and_the_same_parameters() -> None:
    small, large = (construct("vgg8_cifar", num_classes=10, image_size=size, seed=0) for size in (32, 64))
    assert {name: p.shape for name, p in small.named_parameters()} == {name: p.shape for name, p in large.named_parameters()}
    sizes: list[int] = []
    large.get_submodule("layer4").register_forward_hook(lambda module, args, output: sizes.append(output.shape[-1]))
    with torch.no_grad():
        large(torch.zeros(1, 3, 64, 64))
    assert sizes == [4]


def test_a_wide_resnets_depth_that_is_not_6n_plus_4_is_refused() -> None:
    from trainables.models.cifar.wrn import CifarWideResNet

    with pytest.raises(ValueError, match="6n"):
        CifarWideResNet(10, depth=18, widen=2)


@pytest.mark.parametrize(
    ("name", "deviation"),
    [("wrn_16_2", (2 / (9 * 128)) ** 0.5), ("vgg8_cifar", (2 / (9 * 512)) ** 0.5), ("resnet50_cifar", (2 / 2048) ** 0.5)],
)
def test_convolutions_begin_with_he_2015s_deviation_over_the_outputs(name: str, deviation: float) -> None:
    model = construct(name, num_classes=10, image_size=32, seed=0)
    last = [module for module in model.modules() if isinstance(module, nn.Conv2d)][-1 if name != "wrn_16_2" else -2]
    assert last.weight.std().item() == pytest.approx(deviation, rel=0.02)
