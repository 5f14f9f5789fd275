"""A network whose layers are on several devices computes what it computes on one, and each device has its share."""

import pytest
import torch
from torch import nn

from trainables.errors import ModelError
from trainables.models.registry import construct
from trainables.teachers.service.split_network import SplitNetwork, over_devices

CPU, META = torch.device("cpu"), torch.device("meta")


def network(name: str) -> nn.Module:
    return construct(name, num_classes=10, image_size=32, seed=0).eval()


def parameters_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", ["resnet20", "vgg8_cifar", "mlp_large"])
def test_a_network_on_three_devices_computes_what_it_computes_on_one(name: str) -> None:
    model, images_BCHW = network(name), torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        expected = model(images_BCHW)
        split = over_devices(model, 32, [CPU] * 3)
        assert torch.equal(split(images_BCHW), expected)


def test_each_device_has_about_its_share_of_the_parameters_and_no_others() -> None:
    whole = parameters_of(model := network("resnet56"))
    split = over_devices(model, 32, [CPU, META])
    assert isinstance(split, SplitNetwork)
    first, last = split.parts
    assert parameters_of(first) + parameters_of(last) == whole
    assert max(map(parameters_of, split.parts)) < 0.55 * whole
    assert {parameter.device for parameter in first.parameters()} == {CPU}
    assert {tensor.device for tensor in (*last.parameters(), *last.buffers())} == {META}
    with torch.no_grad():
        logits_BK = split(torch.rand(2, 3, 32, 32))
    assert (logits_BK.device, logits_BK.shape) == (META, (2, 10)), "activations are copied to the device of the next part"


def test_more_devices_than_a_network_can_be_cut_for_are_refused() -> None:
    with pytest.raises(ModelError, match=r"teacher.service_devices 64: CifarResNet can be cut at \d+ points: write at most \d+"):
        over_devices(network("resnet8"), 32, [CPU] * 64)
