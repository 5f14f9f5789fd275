"""Random erasing against torchvision's own way to choose a rectangle, and what is erased."""

import math

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from tests.trainables.device.pictures import pictures
from trainables.device.erasing import RandomErasing
from trainables.device.random_numbers import Draws

CPU, MEAN = torch.device("cpu"), (0.485, 0.456, 0.406)


def torchvisions(row: list[float], probability: float, height: int, width: int) -> tuple[int, int, int, int] | None:
    """(top, left, height, width) by torchvision's RandomErasing.make_params, with these random numbers."""
    chance, down, right, *tries = row
    if chance >= probability:
        return None
    for area_at, ratio_at in zip(tries[0::2], tries[1::2], strict=True):
        area = height * width * (0.02 + (0.33 - 0.02) * area_at)
        ratio = math.exp(math.log(0.3) + (math.log(3.3) - math.log(0.3)) * ratio_at)
        high, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if high < height and wide < width:
            return int(down * (height - high + 1)), int(right * (width - wide + 1)), high, wide
    return None


@pytest.mark.parametrize(("height", "width"), [(224, 224), (32, 20), (3, 60), (1, 1)])
def test_the_rectangles_are_torchvisions(height: int, width: int) -> None:
    uniforms = Draws(5, 0, torch.arange(400)).uniforms("random_erasing", RandomErasing.num_uniforms)
    boxes = RandomErasing(0.6, MEAN, CPU).boxes(uniforms, height, width)
    for row, (top, left, bottom, right) in zip(uniforms.tolist(), boxes.tolist(), strict=True):
        expected = torchvisions(row, 0.6, height, width)
        assert (top, left, bottom - top, right - left) == expected if expected else (bottom, right) == (top, left)


def test_what_is_inside_has_the_mean_color_and_the_rest_stays() -> None:
    images = pictures(64, 24).float()
    uniforms = Draws(1, 1, torch.arange(64)).uniforms("random_erasing", RandomErasing.num_uniforms)
    erasing = RandomErasing(0.5, MEAN, CPU)
    erased = erasing(images, uniforms)
    fill = 255 * torch.tensor(MEAN)[:, None, None]
    boxes = erasing.boxes(uniforms, 24, 24).long().tolist()
    for image, image_erased, (top, left, bottom, right) in zip(images, erased, boxes, strict=True):
        assert torch.allclose(image_erased, TF.erase(image, top, left, bottom - top, right - left, fill))
    changed = int((erased != images).flatten(1).any(1).sum())
    assert 20 < changed < 44
