import math

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms import functional as tv

from tests.trainables.data.photos import photo
from trainables.data.augment import (
    AUGMENTS,
    ResizeOptions,
    default_val_resize,
    random_resized_crop_box,
    uniforms,
    validation_view,
)
from trainables.data.decode import StoredImage, UnreadableImageError
from trainables.data.decoders import DECODERS


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    return abs(float(np.corrcoef(left.ravel(), right.ravel())[0, 1]))


def _shown(name: str, image: Image.Image, uniforms_U: np.ndarray, size: int, val_resize: int | None = None) -> np.ndarray:
    out_HWC = np.full((size, size, 3), 77, dtype=np.uint8)
    stored = StoredImage(np.asarray(image), DECODERS["pil"]())
    options = ResizeOptions(val_resize, exact=True)
    AUGMENTS[name].show(AUGMENTS[name].plan(stored, uniforms_U, size, options), out_HWC, options)
    if in_place := AUGMENTS[name].in_place:
        in_place(uniforms_U[None], out_HWC[None])
    return out_HWC


def test_random_numbers_of_a_sample_do_not_depend_on_the_others() -> None:
    all_BU = uniforms(7, 3, np.arange(1000), 23)
    chosen = np.array([999, 5, 500])
    assert (uniforms(7, 3, chosen, 23) == all_BU[chosen]).all()
    assert (uniforms(7, 3, chosen, 4) == all_BU[chosen, :4]).all()
    assert uniforms(7, 3, np.array([], dtype=np.int64), 5).shape == (0, 5)
    assert uniforms(7, 3, chosen, 0).shape == (3, 0)


def test_random_numbers_are_uniform() -> None:
    values_BU = uniforms(0, 0, np.arange(20_000), 8)
    assert values_BU.min() >= 0
    assert values_BU.max() < 1
    for column_B in values_BU.T:  # 99 degrees of freedom: chi-square is 99 ± 14
        counts = np.bincount((column_B * 100).astype(int), minlength=100)
        assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * 14
    bits = (values_BU * 2**53).astype(np.uint64)
    for bit in range(53):
        assert ((bits >> np.uint64(bit)) & np.uint64(1)).mean() == pytest.approx(0.5, abs=0.01)


def test_random_numbers_are_independent_over_samples_columns_epochs_and_seeds() -> None:
    here = uniforms(5, 10, np.arange(20_000), 4)  # a correlation of 80,000 pairs is below 0.018 by five deviations
    assert _correlation(here[:-1], here[1:]) < 0.018
    assert _correlation(here[:, :-1], here[:, 1:]) < 0.02
    for other in ((5, 11), (6, 10), (10, 5), (5, 10 + 2**20)):
        assert _correlation(here, uniforms(*other, np.arange(20_000), 4)) < 0.018
    assert len(np.unique(here)) == here.size


def test_seed_and_epoch_and_index_do_not_stand_for_each_other() -> None:
    rows = {uniforms(seed, epoch, np.array([index]), 1).item() for seed in range(8) for epoch in range(8) for index in range(8)}
    assert len(rows) == 8**3


@pytest.mark.parametrize(("width", "height"), [(40, 32), (500, 375), (33, 80), (8, 8), (1, 1), (2, 300)])
def test_crop_boxes_lie_inside_the_image(width: int, height: int) -> None:
    for uniforms_U in uniforms(0, 0, np.arange(500), 22):
        left, top, right, bottom = random_resized_crop_box(uniforms_U, width, height)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


def test_crop_boxes_are_distributed_as_torchvisions() -> None:
    width, height, draws = 500, 375, 4000
    image = Image.new("L", (width, height))
    torch.manual_seed(0)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(draws)], dtype=float)
    boxes = np.array([random_resized_crop_box(row, width, height) for row in uniforms(0, 0, np.arange(draws), 22)], dtype=float)
    ours = np.stack([boxes[:, 1], boxes[:, 0], boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]], axis=1)
    for column, other in zip(ours.T, theirs.T, strict=True):
        for level in (5, 25, 50, 75, 95):
            assert np.percentile(column, level) == pytest.approx(np.percentile(other, level), abs=14)
    area = ours[:, 2] * ours[:, 3] / (width * height)
    ratio = ours[:, 3] / ours[:, 2]
    assert area.min() > 0.079
    assert area.max() <= 1
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35


@pytest.mark.parametrize(("width", "height"), [(1000, 10), (10, 1000)])
def test_an_image_that_no_try_fits_gives_torchvisions_central_box(width: int, height: int) -> None:
    top, left, crop_height, crop_width = RandomResizedCrop.get_params(
        Image.new("L", (width, height)), [0.08, 1.0], [3 / 4, 4 / 3]
    )
    box = random_resized_crop_box(uniforms(1, 1, np.array([1]), 22)[0], width, height)
    assert box == (left, top, left + crop_width, top + crop_height)


def test_exact_crop_flip_gives_the_pixels_that_torchvision_gives_for_the_same_box_within_a_rounding() -> None:
    image, flips = photo(1, 61, 47), 0
    for uniforms_U in uniforms(0, 0, np.arange(20), AUGMENTS["crop_flip"].num_uniforms):
        left, top, right, bottom = random_resized_crop_box(uniforms_U[1:], *image.size)
        expected = tv.resized_crop(image, top, left, bottom - top, right - left, [24, 24])
        if uniforms_U[0] < 0.5:
            expected, flips = tv.hflip(expected), flips + 1
        difference = _shown("crop_flip", image, uniforms_U, 24).astype(int) - np.asarray(expected)
        assert abs(difference).max() <= 1
        assert (difference**2).mean() < 0.4  # 52 dB
    assert 0 < flips < 20


def test_pad_crop_flip_gives_the_pixels_of_a_padded_crop_at_every_place() -> None:
    image = photo(2, 32, 32)
    padded = tv.pad(image, [4])
    wanted = {tv.crop(padded, top, left, 32, 32).tobytes(): False for top in range(9) for left in range(9)}
    wanted |= {tv.hflip(tv.crop(padded, top, left, 32, 32)).tobytes(): True for top in range(9) for left in range(9)}
    rows = uniforms(0, 0, np.arange(3000), AUGMENTS["pad_crop_flip"].num_uniforms)
    views = [_shown("pad_crop_flip", image, row, 32).tobytes() for row in rows]
    assert set(views) == set(wanted)
    assert sum(wanted[view] for view in views) == pytest.approx(1500, abs=140)


@pytest.mark.parametrize(("image_size", "val_resize"), [(24, None), (32, None), (32, 32), (29, 40), (64, None)])
@pytest.mark.parametrize(("width", "height"), [(41, 32), (32, 41), (64, 64), (100, 31), (31, 97), (33, 33), (300, 225)])
def test_validation_gives_the_pixels_of_torchvisions_transforms(
    width: int, height: int, image_size: int, val_resize: int | None
) -> None:
    image = photo(width + height, width, height)
    if val_resize is None and image.size == (image_size, image_size):
        return
    theirs = v2.Compose([v2.Resize(val_resize or default_val_resize(image_size)), v2.CenterCrop(image_size)])(image)
    ours = validation_view(image, image_size, val_resize)
    assert ours.size == (image_size, image_size)
    assert (np.asarray(ours) == np.asarray(theirs)).all()
    assert (_shown("none", image, np.empty(0), image_size, val_resize) == np.asarray(theirs)).all()


def test_the_usual_resizes_are_those_of_the_published_recipes() -> None:
    assert [default_val_resize(size) for size in (224, 299, 8, 1)] == [256, 342, 9, 1]


def test_an_image_of_the_models_size_is_left_untouched_unless_a_resize_is_set() -> None:
    image = photo(5, 32, 32)
    assert validation_view(image, 32, None) is image
    assert np.asarray(validation_view(image, 32, 36)).tobytes() != image.tobytes()


def test_a_strip_that_would_become_enormous_is_unreadable_rather_than_out_of_memory() -> None:
    with pytest.raises(UnreadableImageError, match="strip of 1 by 20000"):
        validation_view(Image.new("RGB", (1, 20_000)), 224, None)


def test_the_box_uses_areas_uniform_and_ratios_uniform_in_their_logarithm() -> None:
    uniforms_U = np.full(22, 0.5)
    left, top, right, bottom = random_resized_crop_box(uniforms_U, 1000, 1000)
    side = math.sqrt(0.54 * 1000 * 1000)
    assert (right - left, bottom - top) == (round(side), round(side))
    assert (left, top) == (int((1001 - round(side)) / 2), int((1001 - round(side)) / 2))
