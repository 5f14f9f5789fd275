"""Colors of a batch, each image with its own factors, against torchvision's functions on one image after the other."""

import itertools

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from tests.trainables.device.pictures import levels_apart, pictures
from trainables.config import ColorJitterConfig
from trainables.device.color import ColorJitter, Grayscale, blend, column, gray, jitter, mean_level, shift_hue
from trainables.device.random_numbers import Draws

THEIRS = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
FACTORS_8 = torch.tensor([0.0, 0.3, 0.6, 0.9, 1.0, 1.1, 1.4, 2.5], dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 8, 65])
def test_brightness_contrast_and_saturation_are_blends_with_black_the_mean_and_gray(size: int) -> None:
    images = pictures(8, size)
    pixels = images.float()
    others = (torch.zeros(()), mean_level(gray(pixels)), gray(pixels))
    for theirs, other in zip(THEIRS[:3], others, strict=True):
        ours = blend(pixels, other, column(FACTORS_8))
        expected = torch.stack([theirs(image, float(f)) for image, f in zip(images, FACTORS_8, strict=True)])
        most, part = levels_apart(ours, expected)
        assert most <= 1
        assert part < 1e-3


def test_a_turned_hue_is_torchvisions() -> None:
    images = pictures(8, 33)
    turns = torch.tensor([-0.5, -0.31, -0.1, 0.0, 0.02, 0.17, 0.4, 0.5], dtype=torch.float64)
    expected = torch.stack([TF.adjust_hue(image, float(turn)) for image, turn in zip(images, turns, strict=True)])
    most, part = levels_apart(shift_hue(images.float(), turns), expected)
    assert most <= 1
    assert part < 1e-3
    assert torch.equal(shift_hue(images.float(), torch.zeros(8)), images.float())


@pytest.mark.parametrize("hue", [True, False])
def test_each_image_has_its_own_order_and_factors(hue: bool) -> None:
    orders = torch.tensor(list(itertools.permutations(range(4))))
    images = pictures(len(orders), 16)
    factors = 0.6 + 0.8 * torch.rand((len(orders), 4), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    factors[:, 3] = factors[:, 3] / 2 - 0.5
    ours = jitter(images.float(), factors, orders.argsort(dim=1).double(), hue=hue)
    for image, order, row, image_of_ours in zip(images, orders, factors, ours, strict=True):
        for number in order.tolist():
            if hue or number != 3:
                image = THEIRS[number](image, float(row[number]))
        most, part = levels_apart(image_of_ours, image)
        assert most <= 4  # a level apart before a hue may be several after it
        assert part < 0.01


def test_factors_fill_their_range_and_orders_are_equally_likely() -> None:
    uniforms = Draws(0, 0, torch.arange(4000)).uniforms("color_jitter", ColorJitter.num_uniforms)
    order, at, _ = uniforms.tensor_split((4, 8), dim=1)
    counts = torch.unique(order.argsort(dim=1), dim=0, return_counts=True)[1]
    assert len(counts) == 24
    assert int(counts.min()) > 110  # 167 are expected
    ours = ColorJitter(ColorJitterConfig(brightness=0.4))(torch.full((4000, 3, 1, 1), 100.0), uniforms)[:, 0, 0, 0]
    below = 100 * (0.6 + 0.8 * at[:, 0]) - ours
    assert float(below.min()) > -1e-4
    assert float(below.max()) < 1


def test_nothing_to_change_changes_nothing() -> None:
    images = pictures(8, 9).float()
    uniforms = Draws(0, 0, torch.arange(8)).uniforms("color_jitter", ColorJitter.num_uniforms)
    assert torch.equal(ColorJitter(ColorJitterConfig())(images, uniforms), images)


def test_a_part_of_the_images_is_jittered_or_loses_its_colors_and_the_others_stay() -> None:
    images, rows = pictures(8, 9).float().repeat(250, 1, 1, 1), torch.arange(2000)
    draws = Draws(0, 0, rows)
    uniforms = draws.uniforms("color_jitter", ColorJitter.num_uniforms)
    all_of_them = ColorJitter(ColorJitterConfig(brightness=0.4, hue=0.1))(images, uniforms)
    some = ColorJitter(ColorJitterConfig(brightness=0.4, hue=0.1, probability=0.8))(images, uniforms)
    gray_some = Grayscale(0.2)(images, draws.uniforms("grayscale", 1))
    for ours, changed, share in ((some, all_of_them, 0.8), (gray_some, TF.rgb_to_grayscale(images, 3).floor(), 0.2)):
        is_changed = (ours != images).flatten(1).any(1)
        assert torch.equal(ours, torch.where(column(is_changed), changed, images))
        assert is_changed.float().mean().item() == pytest.approx(share, abs=0.04)
