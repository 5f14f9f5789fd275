"""Where models can be cut, and that their stages compute what the whole model does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import get_model

from tests.trainables.models.small_families import SMALL, small
from trainables.distributed.pipeline.graph import become_stage, split
from trainables.errors import ModelError
from trainables.models.cut_points import cut_points
from trainables.models.registry import construct


def _names(model: nn.Module, image_size: int = 32) -> list[str]:
    return cut_points(model, image_size)


def test_a_residual_network_is_cut_between_its_blocks_and_never_through_one() -> None:
    names = _names(get_model("resnet18", num_classes=10))
    assert names == [
        "bn1",
        "maxpool",
        "layer1",
        "layer1.1",
        "layer2",
        "layer2.1",
        "layer3",
        "layer3.1",
        "layer4",
        "layer4.1",
        "avgpool",
        "fc",
    ]


def test_dense_connections_are_not_cut() -> None:
    names = _names(small("densenet", 32))
    assert "features.denseblock2" in names
    assert not any("denselayer2" in name for name in names)


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.mean() > 0 else x


_BACK = (nn.Unflatten(1, (8, 32, 32)), nn.Conv2d(8, 8, 1))


def _tower(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 1), *modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def test_a_module_that_branches_on_values_is_not_cut_inside() -> None:
    assert _names(_tower(_Branching(), nn.Conv2d(8, 8, 1))) == ["1", "2", "3", "4", "5"]


def test_a_model_that_branches_on_values_itself_is_refused() -> None:
    class Whole(_Branching):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(3, 5, 1)

    with pytest.raises(ModelError, match="Whole cannot be cut into pipeline stages"):
        cut_points(Whole(), 8)


def test_no_cut_lies_between_two_uses_of_a_parameter() -> None:
    shared = nn.Conv2d(8, 8, 1)
    names = _names(_tower(shared, nn.Conv2d(8, 8, 1), shared, nn.Conv2d(8, 8, 1)))
    assert names == ["1", "4", "5", "6", "7"]


def test_no_stage_begins_with_an_operation_in_place() -> None:
    names = _names(_tower(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Flatten(), nn.Hardtanh(inplace=True), *_BACK))
    assert "1" not in names
    assert "3" in names
    assert not {"4", "5"} & set(names), "what changes a view changes the tensor"


MODELS = [
    "resnet18",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    pytest.param("googlenet", marks=pytest.mark.slow),
    "vit",
    "timm/convnext_atto",
    "resnet8",
    "wrn_16_1",
]


def _stages(model: nn.Module, cuts: list[str]) -> list[nn.Module]:
    """A copy of the model for each stage, as ranks have them."""
    stages = [copy.deepcopy(model) for _ in range(len(cuts) + 1)]
    for index, stage in enumerate(stages):
        become_stage(stage, cuts, index)
    return stages


@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_whole_model_does_under_its_names(name: str) -> None:
    size = 32 if name in ("resnet8", "wrn_16_1") else 64
    model = small(name, size) if name in SMALL else construct(name, num_classes=7, image_size=size, seed=0)
    names = _names(model, size)
    stages = _stages(model, [names[len(names) // 3], names[2 * len(names) // 3]])
    assert sorted(name for stage in stages for name in stage.state_dict()) == sorted(model.state_dict())
    images_BCHW = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    for training in (True, False):
        torch.manual_seed(1)
        expected = model.train(training)(images_BCHW)
        torch.manual_seed(1)
        found = images_BCHW
        for stage in stages:
            found = stage.train(training)(found)
        for one, other in zip(_tensors(found), _tensors(expected), strict=True):
            assert torch.equal(one, other)
        state = {key: value for stage in stages for key, value in stage.state_dict().items()}
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def _tensors(output: object) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [tensor for tensor in output if tensor is not None]  # type: ignore[attr-defined]


def test_a_model_can_be_cut_at_all_of_its_cut_points_at_once() -> None:
    model = small("vit", 32)
    names = _names(model)
    assert "encoder.layers.encoder_layer_1" in names
    assert len(split(model, names)) == len(names) + 1


class _Masked(nn.Module):
    """Takes more than images, as timm's vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0, last: bool = True) -> Tensor:
        x = self.second(self.first(x))
        if mask is not None:
            x = x * mask
        x = scale * x.mean((2, 3))
        return self.head(x) if last else x


def test_what_a_forward_takes_besides_the_images_has_its_default() -> None:
    model = _Masked()
    assert _names(model, 8) == ["second", "head"]
    images_BCHW = torch.rand(2, 3, 8, 8)
    received = images_BCHW
    for stage in split(model, ["second", "head"]):
        received = stage(received)
    assert torch.equal(received, model(images_BCHW))


def test_a_vision_transformer_of_timm_is_cut_between_its_blocks() -> None:
    names = _names(construct("timm/vit_tiny_patch16_224", num_classes=10, image_size=32, seed=0), 32)
    assert {f"blocks.{index}" for index in range(1, 12)} <= set(names)


def test_a_large_model_whose_forward_makes_tensors_is_cut_on_the_cpu() -> None:
    model = construct("timm/swin_tiny_patch4_window7_224", num_classes=10, image_size=224, seed=0)
    assert {"layers.1", "layers.2", "layers.3"} <= set(_names(model, 224))


class _CountingNorm(nn.BatchNorm2d):
    """Has a forward of its own, as timm's batch norms with an activation do."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training).relu()


def test_a_subclass_of_batch_norm_stays_whole_and_unchanged() -> None:
    model = _tower(_CountingNorm(8), nn.Conv2d(8, 8, 1))
    assert _names(model, 8) == ["1", "2", "3", "4", "5"]
    stages = _stages(model, ["1", "2"])
    assert model.state_dict()["1.num_batches_tracked"] == 0
    assert set(model.state_dict()) == {name for stage in stages for name in stage.state_dict()}


class _Making(nn.Module):
    """Makes a tensor, which tracing keeps as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.first(x) * torch.tensor(2.0)).mean((2, 3))) + torch.arange(5)


def test_tensors_that_a_forward_makes_are_in_both_modes_and_in_no_checkpoint() -> None:
    model = _Making()
    stages = _stages(model, ["head"])
    assert set(model.state_dict()) == {name for stage in stages for name in stage.state_dict()}
    images_BCHW = torch.rand(2, 3, 8, 8)
    for training in (True, False):
        received = images_BCHW
        for stage in stages:
            received = stage.train(training)(received)
        assert torch.equal(received, model(images_BCHW))


def test_what_no_stage_computes_with_stays() -> None:
    class Unused(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x))

    model = Unused(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    assert set(model.state_dict()) == {name for stage in _stages(model, ["1"]) for name in stage.state_dict()}
