"""Policies: which operations an image gets, drawn for each image by its own random numbers.

Shapes: B images, C=3 channels, H W pixels, U random numbers a sample, N operations one after the other, W chains, T taps.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from trainables.config import PolicyConfig
from trainables.device.color import WHITE, column, gray
from trainables.device.operations import OPERATIONS, SPACES, Operations

_TORCHVISIONS = OPERATIONS[: OPERATIONS.index("invert")]
_TIMMS = OPERATIONS[1:]  # no identity, but invert and solarize_add


class Chain(ABC):
    """Operations one after the other."""

    operations: Operations
    num_uniforms: int

    @abstractmethod
    def kinds(self, uniforms_BU: Tensor) -> Iterator[Tensor]:
        """Yield the kinds (B,) of each operation on the images that have these random numbers."""

    def __call__(self, pixels_BCHW: Tensor, uniforms_BU: Tensor) -> Tensor:
        """See Augmentation."""
        for kinds_B in self.kinds(uniforms_BU):
            pixels_BCHW = self.operations(pixels_BCHW, kinds_B)
        return pixels_BCHW


class RandAugment(Chain):
    """Cubuk, Zoph, Shlens and Le 2020: `num_ops` of the operations, all with one magnitude.

    torchvision's, with magnitudes 0 to 30, or timm's `rand-…-inc1`, with 0 to 10, which leaves out every second operation.
    `magnitude_std` is the deviation of normal noise on the magnitude, timm's mstd.
    """

    _DRAWS = 5

    def __init__(self, config: PolicyConfig, image_size: int, device: torch.device) -> None:
        self.num_uniforms = self._DRAWS * config.num_ops
        self._config, is_timms = config, config.name == "randaugment_timm"
        space = SPACES[config.name]
        self.operations, self._last = Operations(space, image_size, device), space.bins - 1
        self._choice = self.operations.numbers(_TIMMS if is_timms else _TORCHVISIONS)
        self._per_magnitude, self._probability = (10, 0.5) if is_timms else (1, 1.0)

    def kinds(self, uniforms_BU: Tensor) -> Iterator[Tensor]:
        """See Chain."""
        for operation_B, sign_B, chance_B, *normal in uniforms_BU.T.split(self._DRAWS):
            noise_B = (-2 * torch.log1p(-normal[0])).sqrt() * torch.cos(2 * math.pi * normal[1])  # Box and Muller 1958
            magnitude_B = self._config.magnitude + self._config.magnitude_std * noise_B
            bin_B = (magnitude_B * self._per_magnitude).round().clamp(0, self._last).long()
            kinds_B = self.operations.kinds(pick(self._choice, operation_B), bin_B, sign_B)
            yield kinds_B.masked_fill(chance_B >= self._probability, 0)


class TrivialAugment(Chain):
    """Müller and Hutter 2021: one operation, with any magnitude of a wide range."""

    num_uniforms = 3

    def __init__(self, config: PolicyConfig, image_size: int, device: torch.device) -> None:
        self.operations = Operations(SPACES[config.name], image_size, device)
        self._choice = self.operations.numbers(_TORCHVISIONS)
        self._bins = torch.arange(SPACES[config.name].bins).to(device)

    def kinds(self, uniforms_BU: Tensor) -> Iterator[Tensor]:
        """See Chain."""
        operation_B, bin_B, sign_B = uniforms_BU.unbind(1)
        yield self.operations.kinds(pick(self._choice, operation_B), pick(self._bins, bin_B), sign_B)


_IMAGENET = """
posterize 0.4 8 rotate 0.6 9, solarize 0.6 5 autocontrast 0.6 0, equalize 0.8 0 equalize 0.6 0, posterize 0.6 7 posterize 0.6 6,
equalize 0.4 0 solarize 0.2 4, equalize 0.4 0 rotate 0.8 8, solarize 0.6 3 equalize 0.6 0, posterize 0.8 5 equalize 1.0 0,
rotate 0.2 3 solarize 0.6 8, equalize 0.6 0 posterize 0.4 6, rotate 0.8 8 color 0.4 0, rotate 0.4 9 equalize 0.6 0,
equalize 0.0 0 equalize 0.8 0, invert 0.6 0 equalize 1.0 0, color 0.6 4 contrast 1.0 8, rotate 0.8 8 color 1.0 2,
color 0.8 8 solarize 0.8 7, sharpness 0.4 7 invert 0.6 0, shear_x 0.6 5 equalize 1.0 0, color 0.4 0 equalize 0.6 0,
equalize 0.4 0 solarize 0.2 4, solarize 0.6 5 autocontrast 0.6 0, invert 0.6 0 equalize 1.0 0, color 0.6 4 contrast 1.0 8,
equalize 0.8 0 equalize 0.6 0
"""


class AutoAugment(Chain):
    """Cubuk, Zoph, Mané, Vasudevan and Le 2019: one of 25 pairs of operations, each with its probability and bin (table 9)."""

    num_uniforms = 5

    def __init__(self, config: PolicyConfig, image_size: int, device: torch.device) -> None:
        self.operations = Operations(SPACES[config.name], image_size, device)
        words = [pair.split() for pair in _IMAGENET.split(",")]
        self._pairs = torch.arange(len(words)).to(device)
        self._numbers_P2 = self.operations.numbers(tuple(word for pair in words for word in pair[::3])).view(-1, 2)
        self._bins_P2 = torch.tensor([[int(word) for word in pair[2::3]] for pair in words]).to(device)
        self._probabilities_P2 = torch.tensor([[float(word) for word in pair[1::3]] for pair in words]).double().to(device)

    def kinds(self, uniforms_BU: Tensor) -> Iterator[Tensor]:
        """See Chain."""
        pair_B, *draws = uniforms_BU.unbind(1)
        pair_B = pick(self._pairs, pair_B)
        for nth, (chance_B, sign_B) in enumerate((draws[:2], draws[2:])):
            kinds_B = self.operations.kinds(self._numbers_P2[pair_B, nth], self._bins_P2[pair_B, nth], sign_B)
            yield kinds_B.masked_fill(chance_B >= self._probabilities_P2[pair_B, nth], 0)


class AugMix:
    """Hendrycks, Mu, Cubuk, Zoph, Gilmer and Lakshminarayanan 2020: the image mixed with three chains of one to three operations.

    torchvision's, with all operations and shares from Beta(1, 1) and Dirichlet(1, 1, 1); without the paper's second loss.
    """

    _CHAINS, _DEPTH = 3, 3
    num_uniforms = 1 + _CHAINS * (2 + 3 * _DEPTH)

    def __init__(self, config: PolicyConfig, image_size: int, device: torch.device) -> None:
        self.operations = Operations(SPACES[config.name], image_size, device)
        self._choice = self.operations.numbers(_TORCHVISIONS[1:])
        self._bins = torch.arange(config.severity).to(device)

    def __call__(self, pixels_BCHW: Tensor, uniforms_BU: Tensor) -> Tensor:
        """See Augmentation."""
        own_B, chains_BWU = uniforms_BU[:, 0], uniforms_BU[:, 1:].unflatten(1, (self._CHAINS, -1))
        shares_BW = -torch.log1p(-chains_BWU[:, :, 0])
        shares_BW = (1 - own_B)[:, None] * shares_BW / shares_BW.sum(1, keepdim=True).clamp(min=1e-300)
        mixed_BCHW = pixels_BCHW * column(own_B).to(pixels_BCHW.dtype)
        for chain in range(self._CHAINS):
            depth_B, draws_NB3 = chains_BWU[:, chain, 1], chains_BWU[:, chain, 2:].unflatten(1, (self._DEPTH, 3)).transpose(0, 1)
            changed_BCHW = pixels_BCHW
            for nth, draws_B3 in enumerate(draws_NB3):
                operation_B, bin_B, sign_B = draws_B3.unbind(1)
                kinds_B = self.operations.kinds(pick(self._choice, operation_B), pick(self._bins, bin_B), sign_B)
                changed_BCHW = self.operations(changed_BCHW, kinds_B.masked_fill(depth_B * self._DEPTH < nth, 0))
            mixed_BCHW = mixed_BCHW.addcmul_(changed_BCHW, column(shares_BW[:, chain]).to(pixels_BCHW.dtype))
        return mixed_BCHW.clamp_(0, WHITE).floor_()


class ThreeAugment:
    """DeiT III's: Touvron, Cord and Jégou 2022. An image becomes gray, is solarized, or blurred; color jitter may follow."""

    num_uniforms = 2

    def __init__(self, config: PolicyConfig, image_size: int, device: torch.device) -> None:
        """Nothing of them decides anything."""

    def __call__(self, pixels_BCHW: Tensor, uniforms_BU: Tensor) -> Tensor:
        """See Augmentation."""
        which, sigma_B = column(uniforms_BU[:, 0] * 3), 0.1 + 1.9 * uniforms_BU[:, 1]
        solarized_BCHW = torch.where(pixels_BCHW >= 128, WHITE - pixels_BCHW, pixels_BCHW)
        changed_BCHW = torch.where(which < 2, solarized_BCHW, blurred(pixels_BCHW, sigma_B))
        return torch.where(which < 1, gray(pixels_BCHW), changed_BCHW)


def blurred(pixels_BCHW: Tensor, sigma_B: Tensor) -> Tensor:
    """A Gaussian blur by 13 × 13 pixels (less of a small image), each image with its own deviation; mirrored at the edges."""
    radius = min(6, min(pixels_BCHW.shape[2:]) - 1)
    offsets_T = torch.arange(-radius, radius + 1, device=pixels_BCHW.device)
    weights_BT = torch.softmax(-0.5 * (offsets_T / sigma_B[:, None]) ** 2, dim=1).to(pixels_BCHW.dtype)
    output = F.pad(pixels_BCHW, [radius] * 4, mode="reflect")
    for dim in (2, 3):
        padded, output = output, output.narrow(dim, 0, pixels_BCHW.shape[dim]) * column(weights_BT[:, 0])
        for tap, weight_B in enumerate(weights_BT.T[1:], 1):
            output.addcmul_(padded.narrow(dim, tap, pixels_BCHW.shape[dim]), column(weight_B))
    return output.round_()


def pick(values: Tensor, uniforms_B: Tensor) -> Tensor:
    """One of `values` for each random number in [0, 1), all equally likely."""
    return values[(uniforms_B * len(values)).long()]


Policy = RandAugment | AutoAugment | TrivialAugment | AugMix | ThreeAugment
POLICIES: dict[str, type[Policy]] = {
    "randaugment": RandAugment,
    "randaugment_timm": RandAugment,
    "autoaugment": AutoAugment,
    "trivialaugment": TrivialAugment,
    "augmix": AugMix,
    "three_augment": ThreeAugment,
}
"""The values of `data.device_augment.policy.name`."""
