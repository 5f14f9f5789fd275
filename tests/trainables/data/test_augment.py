import hashlib
import io
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms import functional as tv

from tests.trainables.data.decoders import DECODERS, decoder_or_skip
from tests.trainables.data.photos import encoded, photo
from trainables.config import DataConfig
from trainables.data import augment as augment_module
from trainables.data.augment import (
    AUGMENTS,
    Augment,
    default_val_resize,
    random_resized_crop_box,
    uniforms,
    validation_view,
)
from trainables.data.decode import UnreadableImageError
from trainables.data.order import Split


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    return abs(float(np.corrcoef(left.ravel(), right.ravel())[0, 1]))


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each decoder that is installed, in use."""
    found = decoder_or_skip(request.param)
    monkeypatch.setattr(augment_module, "open_decoder", lambda: found)
    return str(request.param)


def _augment(split: Split = "train", image_size: int = 64, **options: object) -> Augment:
    return Augment(DataConfig.model_validate({"image_size": image_size, **options}), split)


def _shown(augment: Augment, sample: bytes | np.ndarray, uniforms_U: np.ndarray, size: int = 64) -> np.ndarray:
    out_HWC = np.full((size, size, 3), 77, dtype=np.uint8)
    augment.render(sample, uniforms_U, out_HWC)
    augment.finish(uniforms_U[None], out_HWC[None])
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


@pytest.mark.parametrize("min_area", [0.08, 0.5])
def test_crop_boxes_are_distributed_as_torchvisions(min_area: float) -> None:
    width, height, draws = 500, 375, 4000
    image = Image.new("L", (width, height))
    torch.manual_seed(0)
    theirs = np.array([RandomResizedCrop.get_params(image, [min_area, 1.0], [3 / 4, 4 / 3]) for _ in range(draws)], dtype=float)
    rows = uniforms(0, 0, np.arange(draws), 22)
    boxes = np.array([random_resized_crop_box(row, width, height, min_area) for row in rows], dtype=float)
    ours = np.stack([boxes[:, 1], boxes[:, 0], boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]], axis=1)
    for column, other in zip(ours.T, theirs.T, strict=True):
        for level in (5, 25, 50, 75, 95):
            assert np.percentile(column, level) == pytest.approx(np.percentile(other, level), abs=14)
    area = ours[:, 2] * ours[:, 3] / (width * height)
    ratio = ours[:, 3] / ours[:, 2]
    assert area.min() > min_area - 0.001
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
    augment = _augment(image_size=24, augment="crop_flip", fidelity="exact")
    for uniforms_U in uniforms(0, 0, np.arange(20), AUGMENTS["crop_flip"]):
        left, top, right, bottom = random_resized_crop_box(uniforms_U[1:], *image.size)
        expected = tv.resized_crop(image, top, left, bottom - top, right - left, [24, 24])
        if uniforms_U[0] < 0.5:
            expected, flips = tv.hflip(expected), flips + 1
        difference = _shown(augment, np.asarray(image), uniforms_U, 24).astype(int) - np.asarray(expected)
        assert abs(difference).max() <= 1
        assert (difference**2).mean() < 0.4  # 52 dB
    assert 0 < flips < 20


def test_pad_crop_flip_gives_the_pixels_of_a_padded_crop_at_every_place() -> None:
    image = photo(2, 32, 32)
    padded = tv.pad(image, [4])
    wanted = {tv.crop(padded, top, left, 32, 32).tobytes(): False for top in range(9) for left in range(9)}
    wanted |= {tv.hflip(tv.crop(padded, top, left, 32, 32)).tobytes(): True for top in range(9) for left in range(9)}
    rows = uniforms(0, 0, np.arange(3000), AUGMENTS["pad_crop_flip"])
    augment = _augment(image_size=32, augment="pad_crop_flip")
    views = [_shown(augment, np.asarray(image), row, 32).tobytes() for row in rows]
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
    assert np.array_equal(validation_view(np.asarray(image), image_size, val_resize), np.asarray(theirs))
    augment = _augment("val", image_size, val_resize=val_resize)
    assert (_shown(augment, np.asarray(image), np.empty(0), image_size) == np.asarray(theirs)).all()


def test_the_usual_resizes_are_those_of_the_published_recipes() -> None:
    assert [default_val_resize(size) for size in (224, 299, 8, 1)] == [256, 342, 9, 1]


def test_an_image_of_the_models_size_is_left_untouched_unless_a_resize_is_set() -> None:
    rgb_HWC = np.asarray(photo(5, 32, 32))
    assert validation_view(rgb_HWC, 32, None) is rgb_HWC
    assert not np.array_equal(validation_view(rgb_HWC, 32, 36), rgb_HWC)


def test_a_strip_that_would_become_enormous_is_unreadable_rather_than_out_of_memory() -> None:
    with pytest.raises(UnreadableImageError, match="strip of 1 by 20000"):
        validation_view(np.zeros((20_000, 1, 3), dtype=np.uint8), 224, None)


def test_the_box_uses_areas_uniform_and_ratios_uniform_in_their_logarithm() -> None:
    uniforms_U = np.full(22, 0.5)
    left, top, right, bottom = random_resized_crop_box(uniforms_U, 1000, 1000)
    side = math.sqrt(0.54 * 1000 * 1000)
    assert (right - left, bottom - top) == (round(side), round(side))
    assert (left, top) == (int((1001 - round(side)) / 2), int((1001 - round(side)) / 2))


def _rows(count: int) -> np.ndarray:
    return uniforms(0, 0, np.arange(count), AUGMENTS["crop_flip"])


def _reference(data: bytes, uniforms_U: np.ndarray, size: int = 64) -> np.ndarray:
    """What torchvision's transforms give for the same crop box."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    left, top, right, bottom = random_resized_crop_box(uniforms_U[1:], *image.size)
    crop = tv.resized_crop(image, top, left, bottom - top, right - left, [size, size])
    return np.asarray(tv.hflip(crop) if uniforms_U[0] < 0.5 else crop)


def _psnr_db(left: np.ndarray, right: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(((left.astype(float) - right) ** 2).mean(), 1e-3)))


def _smooth(width: int, height: int, seed: int = 1) -> Image.Image:
    """A picture with the detail of a photograph: what is shown is several times smaller than its grain."""
    return photo(seed, width // 6, height // 6).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("subsampling", [0, 2])
def test_an_exact_view_is_torchvisions_within_a_rounding(decoder: str, subsampling: int) -> None:
    data = encoded(photo(1, 190, 140), "JPEG", quality=92, subsampling=subsampling)
    augment = _augment(augment="crop_flip", fidelity="exact")
    assert augment.decoder == decoder
    for row in _rows(30):
        shown, expected = _shown(augment, data, row), _reference(data, row)
        assert abs(shown.astype(int) - expected).max() <= 1
        assert _psnr_db(shown, expected) > 50


@pytest.mark.parametrize(("width", "height"), [(80, 70), (240, 180), (900, 700), (2400, 1800)])
def test_a_fast_view_is_near_to_the_exact_one_at_every_scale(decoder: str, width: int, height: int) -> None:
    data = encoded(_smooth(width, height), "JPEG", quality=92)
    augment = _augment(augment="crop_flip")
    figures = [_psnr_db(_shown(augment, data, row), _reference(data, row)) for row in _rows(12)]
    assert np.mean(figures) > 37
    assert min(figures) > 32


@pytest.mark.parametrize("fidelity", ["fast", "exact"])
@pytest.mark.parametrize(("width", "height"), [(300, 225), (97, 310), (64, 64)])
def test_validation_is_torchvisions_bit_for_bit_whatever_training_is(
    decoder: str, fidelity: str, width: int, height: int
) -> None:
    data = encoded(photo(2, width, height), "JPEG", quality=90)
    augment = _augment("val", augment="crop_flip", fidelity=fidelity)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    expected = image if image.size == (64, 64) else v2.Compose([v2.Resize(73), v2.CenterCrop(64)])(image)
    assert augment.num_uniforms == 0
    assert (_shown(augment, data, np.empty(0)) == np.asarray(expected)).all()


@pytest.mark.parametrize("name", AUGMENTS)
@pytest.mark.parametrize("fidelity", ["fast", "exact"])
def test_stored_pixels_and_a_lossless_file_show_the_same(name: str, fidelity: str) -> None:
    augment = _augment(augment=name, fidelity=fidelity)
    image = photo(3, 120, 90)
    pixels_HWC = np.asarray(image)
    pixels_HWC.flags.writeable = False  # as memory-mapped records are
    for row in _rows(8)[:, : augment.num_uniforms]:
        assert (_shown(augment, encoded(image, "PNG"), row) == _shown(augment, pixels_HWC, row)).all()


@pytest.mark.parametrize("name", AUGMENTS)
def test_threads_show_what_one_thread_shows(name: str) -> None:
    data = encoded(photo(4, 200, 150), "JPEG")
    augment = _augment(augment=name)
    rows = _rows(64)[:, : augment.num_uniforms]
    alone = [_shown(augment, data, row) for row in rows]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda row: _shown(augment, data, row), rows))
    assert all((one == other).all() for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_truncated_file_is_unreadable(split: Split) -> None:
    data = encoded(photo(5, 200, 150), "JPEG")
    augment = _augment(split, augment="crop_flip")
    for row in _rows(5)[:, : augment.num_uniforms]:
        with pytest.raises(UnreadableImageError, match="truncated"):
            _shown(augment, data[: len(data) * 2 // 3], row)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 40), (3000, 2), (8, 8), (1, 60_000)])
def test_the_smallest_and_the_thinnest_images_are_shown(decoder: str, width: int, height: int) -> None:
    data = encoded(Image.new("RGB", (width, height), (200, 30, 90)), "JPEG", quality=100)
    for fidelity in ("fast", "exact"):
        augment = _augment(augment="crop_flip", fidelity=fidelity)
        for row in _rows(6):
            assert abs(_shown(augment, data, row).astype(int) - (200, 30, 90)).max() <= 4


@pytest.mark.parametrize(
    ("name", "fidelity", "expected"),
    [
        ("none", "fast", "8597c2d2891840b5"),
        ("pad_crop_flip", "fast", "26cca66dfe5e08c4"),
        ("crop_flip", "exact", "2a137b2f6a7aa2da"),
        ("crop_flip", "fast", "24a27ee9f7f1a77b"),
    ],
)
def test_stored_pixels_become_the_same_pixels_in_every_version(name: str, fidelity: str, expected: str) -> None:
    """A change of these would change what a run that goes on is trained with, and what a teacher's cache was made of."""
    y_H1, x_W = np.arange(240)[:, None], np.arange(320)
    rgb_HWC = np.stack([x_W * y_H1 // 7 % 256, (x_W * x_W // 50 + y_H1) % 256, (3 * y_H1 + x_W) % 256], axis=2).astype(np.uint8)
    augment = _augment(augment=name, fidelity=fidelity)
    rows = uniforms(7, 2, np.arange(20), augment.num_uniforms)
    shown = b"".join(_shown(augment, rgb_HWC, row).tobytes() for row in rows)
    assert hashlib.sha256(shown).hexdigest()[:16] == expected
