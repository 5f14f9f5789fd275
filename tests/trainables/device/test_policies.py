"""What a policy draws for each image, against torchvision's operations on one image after the other."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import AutoAugment
from torchvision.transforms.v2.functional import gaussian_blur, rgb_to_grayscale, solarize

from tests.trainables.device.pictures import levels_apart, pictures
from tests.trainables.device.test_operations import THEIRS, torchvisions
from trainables.config import PolicyConfig
from trainables.device.operations import OPERATIONS, SPACES
from trainables.device.policies import POLICIES
from trainables.device.random_numbers import Draws

SIZE, COUNT = 24, 60
IMAGES = pictures(COUNT, SIZE)
TORCHVISIONS = OPERATIONS[:14]


def run(**settings: Any) -> tuple[Tensor, list[list[float]]]:
    """IMAGES by a policy, and the random numbers of each."""
    policy = POLICIES[settings["name"]](PolicyConfig.model_validate(settings), SIZE, torch.device("cpu"))
    uniforms_BU = Draws(5, 1, torch.arange(COUNT)).uniforms("policy", policy.num_uniforms)
    return policy(IMAGES.float(), uniforms_BU), uniforms_BU.tolist()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two images differ in a few roundings and ties of a warp at most."""
    most, part = levels_apart(ours, theirs)
    return most <= 1 or part < 0.02


def pick(values: Any, uniform: float) -> Any:
    return values[int(uniform * len(values))]


def test_autoaugment_is_torchvisions_pair_of_operations_with_their_probabilities() -> None:
    ours, uniforms = run(name="autoaugment")
    pairs = AutoAugment()._policies
    for image, found, (which, *draws) in zip(IMAGES, ours, uniforms, strict=True):
        expected = image
        for (name, probability, at), (chance, sign) in zip(pick(pairs, which), (draws[:2], draws[2:]), strict=True):
            own = next(each for each in OPERATIONS if each.replace("_", "") == name.lower())
            if chance < probability:
                expected = torchvisions("autoaugment", expected, own, at or 0, sign < 0.5)
        assert same(found, expected)


def test_trivialaugment_is_one_of_torchvisions_operations_in_any_of_its_bins() -> None:
    ours, uniforms = run(name="trivialaugment")
    for image, found, (operation, at, sign) in zip(IMAGES, ours, uniforms, strict=True):
        assert same(found, torchvisions("trivialaugment", image, pick(TORCHVISIONS, operation), int(at * 31), sign < 0.5))


@pytest.mark.parametrize("std", [0.0, 4.0])
def test_randaugment_is_several_of_torchvisions_operations_at_a_magnitude_with_noise(std: float) -> None:
    ours, uniforms = run(name="randaugment", num_ops=3, magnitude=9, magnitude_std=std)
    bins = set()
    for image, found, draws in zip(IMAGES, ours, uniforms, strict=True):
        expected = image
        for operation, sign, _, first, second in (draws[:5], draws[5:10], draws[10:]):
            noise = math.sqrt(-2 * math.log1p(-first)) * math.cos(2 * math.pi * second)
            at = min(max(round(9 + std * noise), 0), 30)
            bins.add(at)
            expected = torchvisions("randaugment", expected, pick(TORCHVISIONS, operation), at, sign < 0.5)
        assert same(found, expected)
    assert (bins == {9}) if std == 0 else (min(bins) < 4 and max(bins) > 15)


def test_randaugment_timm_leaves_out_every_second_operation_and_magnitudes_have_timms_noise() -> None:
    whole, _ = run(name="randaugment_timm", magnitude=10)
    unchanged = (whole == IMAGES).flatten(1).all(1).double().mean()
    assert 0.15 < float(unchanged) < 0.5  # a quarter; some operations change nothing of some images
    none, _ = run(name="randaugment_timm", num_ops=1, magnitude=0)
    noisy, _ = run(name="randaugment_timm", num_ops=1, magnitude=0, magnitude_std=2.0)
    assert not torch.equal(none, noisy)


def test_augmix_mixes_the_image_with_three_chains_of_torchvisions_operations() -> None:
    ours, uniforms = run(name="augmix", severity=5)
    names = TORCHVISIONS[1:]
    assert {name.replace("_", "") for name in names} == {name.lower() for name in THEIRS["augmix"]._AUGMENTATION_SPACE}
    for image, found, (own, *draws) in zip(IMAGES, ours, uniforms, strict=True):
        chains = [draws[first : first + 11] for first in (0, 11, 22)]
        gammas = [-math.log1p(-chain[0]) for chain in chains]
        mixed = own * image.double()
        for gamma, (_, depth, *steps) in zip(gammas, chains, strict=True):
            changed = image
            for nth in range(math.floor(depth * 3) + 1):
                operation, at, sign = steps[3 * nth : 3 * nth + 3]
                changed = torchvisions("augmix", changed, pick(names, operation), int(at * 5), sign < 0.5)
            mixed += (1 - own) * gamma / sum(gammas) * changed
        assert same(found, mixed.floor())


def test_three_augment_is_gray_solarized_or_blurred_as_torchvision_does_it() -> None:
    ours, uniforms = run(name="three_augment")
    for image, found, (which, at) in zip(IMAGES, ours, uniforms, strict=True):
        sigma = 0.1 + 1.9 * at
        expected = (
            rgb_to_grayscale(image, 3),
            solarize(image, 128.0),
            gaussian_blur(image, [13, 13], [sigma, sigma]),
        )
        most, part = levels_apart(found, pick(expected, which))
        assert most <= 1
        assert part < 0.01


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_takes_images_of_any_size(name: str, size: int) -> None:
    policy = POLICIES[name](PolicyConfig.model_validate({"name": name}), size, torch.device("cpu"))
    pixels = pictures(4, size).float()
    out = policy(pixels, Draws(0, 0, torch.arange(4)).uniforms("policy", policy.num_uniforms))
    assert out.shape == pixels.shape
    assert torch.equal(out, out.floor())
    assert 0 <= float(out.min()) <= float(out.max()) <= 255


@pytest.mark.parametrize(
    ("name", "count"), [("randaugment", 14), ("randaugment_timm", 15), ("trivialaugment", 14), ("augmix", 13)]
)
def test_operations_signs_and_bins_are_equally_likely(name: str, count: int) -> None:
    settings = {"name": name, **({"num_ops": 1} if name.startswith("rand") else {})}
    policy: Any = POLICIES[name](PolicyConfig.model_validate(settings), 1, torch.device("cpu"))
    kinds, bins = list[Tensor](), SPACES[name].bins
    policy.operations = type("Seen", (), {"kinds": policy.operations.kinds, "__call__": lambda _, x, k: kinds.append(k) or x})()
    policy(torch.zeros((28_000, 3, 1, 1)), Draws(0, 0, torch.arange(28_000)).uniforms("policy", policy.num_uniforms))
    drawn = kinds[0] // bins
    if name == "randaugment_timm":
        drawn = drawn[kinds[0] > 0]
        assert len(drawn) == pytest.approx(14_000, abs=350)
    counts = torch.bincount(drawn, minlength=32)
    counts = counts[counts > 0]
    assert len(counts) == 2 * count
    assert float((counts - len(drawn) / len(counts)).abs().max()) < 4.5 * math.sqrt(len(drawn) / len(counts))
    if name == "trivialaugment":
        assert len(torch.unique(kinds[0] % bins)) == 31
