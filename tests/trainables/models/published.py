"""The published CIFAR models written once more, as plain functions over a dictionary of tensors.

Read off the sources of RepDistiller (github.com/HobbitLong/RepDistiller, models/*.py), which mdistiller shares: parameter names,
shapes, strides and what is tapped (`is_feat`, `preact`). A `Net` draws a parameter when it is asked for: one forward makes a
state dict with the published names and shapes, the logits, the taps, the number of parameters and of floating point operations.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, max_pool2d


class Net:
    """Layers by their published names. `flops` counts two for each multiplication of a convolution or a linear layer."""

    def __init__(self, seed: int = 0) -> None:
        self.state: dict[str, Tensor] = {}
        self.flops = 0
        self.stages: list[Tensor] = []
        self.preacts: list[Tensor] = []
        self._draw = torch.Generator().manual_seed(seed)

    @property
    def num_parameters(self) -> int:
        buffers = ("running_mean", "running_var", "num_batches_tracked")
        return sum(tensor.numel() for name, tensor in self.state.items() if not name.endswith(buffers))

    def conv(self, name: str, x: Tensor, out: int, k: int, stride: int = 1, groups: int = 1, bias: bool = False) -> Tensor:
        weight = self._normal(f"{name}.weight", (out, x.shape[1] // groups, k, k))
        y = conv2d(x, weight, self._normal(f"{name}.bias", (out,)) if bias else None, stride, k // 2, 1, groups)
        self.flops += 2 * len(x) * weight.numel() * y.shape[2] * y.shape[3]
        return y

    def norm(self, name: str, x: Tensor) -> Tensor:
        c = x.shape[1]
        self.state[f"{name}.num_batches_tracked"] = torch.tensor(7)
        gain, variance = (self._positive(f"{name}.{part}", c) for part in ("weight", "running_var"))
        shift, mean = (self._normal(f"{name}.{part}", (c,)) for part in ("bias", "running_mean"))
        over = (1, c, 1, 1)
        return (x - mean.view(over)) / (variance.view(over) + 1e-5).sqrt() * gain.view(over) + shift.view(over)

    def linear(self, name: str, x: Tensor, out: int) -> Tensor:
        self.flops += 2 * len(x) * x.shape[1] * out
        return x @ self._normal(f"{name}.weight", (out, x.shape[1])).T + self._normal(f"{name}.bias", (out,))

    def tap(self, stage: Tensor, preact: Tensor | None = None) -> None:
        self.stages.append(stage)
        if preact is not None:
            self.preacts.append(preact)

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.state[name] = torch.randn(shape, generator=self._draw) * math.sqrt(2 / max(1, math.prod(shape[1:])))
        return self.state[name].double()

    def _positive(self, name: str, c: int) -> Tensor:
        self.state[name] = 0.5 + torch.rand(c, generator=self._draw)
        return self.state[name].double()


def resnet(net: Net, x: Tensor, *, depth: int, widths: Sequence[int]) -> Tensor:
    x = net.norm("bn1", net.conv("conv1", x, widths[0], 3)).relu()
    for stage, width in enumerate(widths[1:], start=1):
        for block in range((depth - 2) // 6):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = net.norm(f"{at}.bn1", net.conv(f"{at}.conv1", x, width, 3, stride)).relu()
            y = net.norm(f"{at}.bn2", net.conv(f"{at}.conv2", y, width, 3))
            if stride == 2 or x.shape[1] != width:
                x = net.norm(f"{at}.downsample.1", net.conv(f"{at}.downsample.0", x, width, 1, stride))
            preact = x + y
            x = preact.relu()
        net.tap(x, preact)
    return net.linear("fc", avg_pool2d(x, 8).flatten(1), 100)


def resnet50(net: Net, x: Tensor) -> Tensor:
    x = net.norm("bn1", net.conv("conv1", x, 64, 3)).relu()
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = net.norm(f"{at}.bn1", net.conv(f"{at}.conv1", x, width, 1)).relu()
            y = net.norm(f"{at}.bn2", net.conv(f"{at}.conv2", y, width, 3, stride)).relu()
            y = net.norm(f"{at}.bn3", net.conv(f"{at}.conv3", y, 4 * width, 1))
            if block == 0:
                x = net.norm(f"{at}.shortcut.1", net.conv(f"{at}.shortcut.0", x, 4 * width, 1, stride))
            preact = x + y
            x = preact.relu()
        net.tap(x, preact)
    return net.linear("linear", x.mean((2, 3)), 100)


def wrn(net: Net, x: Tensor, *, depth: int, widen: int) -> Tensor:
    x = net.conv("conv1", x, 16, 3)
    for stage, width in enumerate((16 * widen, 32 * widen, 64 * widen), start=1):
        for block in range((depth - 4) // 6):
            at, stride = f"block{stage}.layer.{block}", 2 if stage > 1 and block == 0 else 1
            normed = net.norm(f"{at}.bn1", x)
            if stage > 1 and block == 0:
                net.preacts.append(normed)
            y = net.norm(f"{at}.bn2", net.conv(f"{at}.conv1", normed.relu(), width, 3, stride)).relu()
            y = net.conv(f"{at}.conv2", y, width, 3)
            x = y + (x if x.shape[1] == width else net.conv(f"{at}.convShortcut", normed.relu(), width, 1, stride))
        net.tap(x)
    normed = net.norm("bn1", x)
    net.preacts.append(normed)
    return net.linear("fc", avg_pool2d(normed.relu(), 8).flatten(1), 100)


def vgg(net: Net, x: Tensor, *, groups: Sequence[Sequence[int]]) -> Tensor:
    for group, widths in enumerate(groups):
        for number, width in enumerate(widths):
            index = 3 * number
            preact = net.norm(f"block{group}.{index + 1}", net.conv(f"block{group}.{index}", x, width, 3, bias=True))
            x = preact.relu()
        if group > 0:
            net.tap(x, preact)
        if group < 3:
            x = max_pool2d(x, 2)
    return net.linear("classifier", x.mean((2, 3)), 100)


def mobile_half(net: Net, x: Tensor) -> Tensor:
    x = net.norm("conv1.1", net.conv("conv1.0", x, 16, 3, 2)).relu()
    rows = ((1, 8, 1, 1), (6, 12, 2, 1), (6, 16, 3, 2), (6, 32, 4, 2), (6, 48, 3, 1), (6, 80, 3, 2), (6, 160, 1, 1))
    for row, (expansion, width, blocks, first_stride) in enumerate(rows):
        for block in range(blocks):
            at, stride, hidden = f"blocks.{row}.{block}.conv", first_stride if block == 0 else 1, x.shape[1] * expansion
            y = net.norm(f"{at}.1", net.conv(f"{at}.0", x, hidden, 1)).relu()
            y = net.norm(f"{at}.4", net.conv(f"{at}.3", y, hidden, 3, stride, groups=hidden)).relu()
            y = net.norm(f"{at}.7", net.conv(f"{at}.6", y, width, 1))
            x = x + y if stride == 1 and x.shape[1] == width else y
        if row in (1, 2, 4, 6):
            net.tap(x)
    x = net.norm("conv2.1", net.conv("conv2.0", x, 1280, 1)).relu()
    return net.linear("classifier.0", avg_pool2d(x, 2).flatten(1), 100)


def shuffled(x: Tensor, groups: int) -> Tensor:
    per_group = x.shape[1] // groups
    return x[:, [group * per_group + i for i in range(per_group) for group in range(groups)]]


def shuffle_v1(net: Net, x: Tensor) -> Tensor:
    x = net.norm("bn1", net.conv("conv1", x, 24, 1)).relu()
    for stage, (width, units) in enumerate(((240, 4), (480, 8), (960, 4)), start=1):
        for unit in range(units):
            at, stride = f"layer{stage}.{unit}", 2 if unit == 0 else 1
            made = width - x.shape[1] if unit == 0 else width
            groups = 1 if x.shape[1] == 24 else 3
            y = shuffled(net.norm(f"{at}.bn1", net.conv(f"{at}.conv1", x, made // 4, 1, groups=groups)).relu(), groups)
            y = net.norm(f"{at}.bn2", net.conv(f"{at}.conv2", y, made // 4, 3, stride, groups=made // 4)).relu()
            y = net.norm(f"{at}.bn3", net.conv(f"{at}.conv3", y, made, 1, groups=3))
            preact = torch.cat((y, avg_pool2d(x, 3, 2, 1)), 1) if unit == 0 else x + y
            x = preact.relu()
        net.tap(x, preact)
    return net.linear("linear", avg_pool2d(x, 4).flatten(1), 100)


def shuffle_v2(net: Net, x: Tensor) -> Tensor:
    x = net.norm("bn1", net.conv("conv1", x, 24, 1)).relu()
    for stage, (width, units) in enumerate(((116, 4), (232, 8), (464, 4)), start=1):
        half = width // 2
        for unit in range(units):
            at = f"layer{stage}.{unit}"
            if unit == 0:
                left = net.norm(f"{at}.bn1", net.conv(f"{at}.conv1", x, x.shape[1], 3, 2, groups=x.shape[1]))
                left = net.norm(f"{at}.bn2", net.conv(f"{at}.conv2", left, half, 1)).relu()
                y = net.norm(f"{at}.bn3", net.conv(f"{at}.conv3", x, half, 1)).relu()
                y = net.norm(f"{at}.bn4", net.conv(f"{at}.conv4", y, half, 3, 2, groups=half))
                preact = net.norm(f"{at}.bn5", net.conv(f"{at}.conv5", y, half, 1))
            else:
                left = x[:, :half]
                y = net.norm(f"{at}.bn1", net.conv(f"{at}.conv1", x[:, half:], half, 1)).relu()
                y = net.norm(f"{at}.bn2", net.conv(f"{at}.conv2", y, half, 3, groups=half))
                preact = net.norm(f"{at}.bn3", net.conv(f"{at}.conv3", y, half, 1))
            x = shuffled(torch.cat((left, preact.relu()), 1), 2)
        net.tap(x, torch.cat((left, preact), 1))
    x = net.norm("bn2", net.conv("conv2", x, 1024, 1)).relu()
    return net.linear("linear", avg_pool2d(x, 4).flatten(1), 100)


NARROW, WIDE = (16, 16, 32, 64), (32, 64, 128, 256)
VGG13 = ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512))

PUBLISHED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    **{f"resnet{depth}": partial(resnet, depth=depth, widths=NARROW) for depth in (8, 14, 20, 32, 44, 56, 110)},
    **{f"resnet{depth}x4": partial(resnet, depth=depth, widths=WIDE) for depth in (8, 32)},
    **{f"wrn_{depth}_{widen}": partial(wrn, depth=depth, widen=widen) for depth in (16, 40) for widen in (1, 2)},
    "resnet50_cifar": resnet50,
    "vgg8_cifar": partial(vgg, groups=((64,), (128,), (256,), (512,), (512,))),
    "vgg11_cifar": partial(vgg, groups=((64,), (128,), (256, 256), (512, 512), (512, 512))),
    "vgg13_cifar": partial(vgg, groups=VGG13),
    "vgg16_cifar": partial(vgg, groups=((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)),
    "vgg19_cifar": partial(vgg, groups=((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4)),
    "mobilenetv2_half_cifar": mobile_half,
    "shufflenetv1_cifar": shuffle_v1,
    "shufflenetv2_cifar": shuffle_v2,
}
"""Our name → (net, images (B, 3, 32, 32) in float64) → logits (B, 100)."""
