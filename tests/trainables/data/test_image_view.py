import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import functional as tv
from torchvision.transforms import v2

from tests.trainables.data.photos import encoded, photo
from trainables.config import DataConfig
from trainables.data import image_view
from trainables.data.augment import AUGMENTS, random_resized_crop_box, uniforms
from trainables.data.decode import UnreadableImageError
from trainables.data.decoders import DECODERS
from trainables.data.image_view import View
from trainables.data.order import Split


def _view(split: Split = "train", image_size: int = 64, **options: object) -> View:
    return View(DataConfig.model_validate({"image_size": image_size, **options}), split)


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each decoder that is installed, as if it were the only one."""
    try:
        DECODERS[request.param]()
    except ImportError as error:
        pytest.skip(f"{request.param} is not installed: {error}")
    monkeypatch.setattr(image_view, "open_decoder", DECODERS[request.param])
    return str(request.param)


def _shown(view: View, sample: bytes | np.ndarray, uniforms_U: np.ndarray, size: int = 64) -> np.ndarray:
    out_HWC = np.full((size, size, 3), 77, dtype=np.uint8)
    view.show(view.plan(sample, uniforms_U), out_HWC)
    view.finish(uniforms_U[None], out_HWC[None])
    return out_HWC


def _rows(count: int) -> np.ndarray:
    return uniforms(0, 0, np.arange(count), AUGMENTS["crop_flip"].num_uniforms)


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
    view = _view(augment="crop_flip", fidelity="exact")
    assert view.decoder == decoder
    for row in _rows(30):
        shown, expected = _shown(view, data, row), _reference(data, row)
        assert abs(shown.astype(int) - expected).max() <= 1
        assert _psnr_db(shown, expected) > 50


@pytest.mark.parametrize(("width", "height"), [(80, 70), (240, 180), (900, 700), (2400, 1800)])
def test_a_fast_view_is_near_to_the_exact_one_at_every_scale(decoder: str, width: int, height: int) -> None:
    data = encoded(_smooth(width, height), "JPEG", quality=92)
    view = _view(augment="crop_flip")
    figures = [_psnr_db(_shown(view, data, row), _reference(data, row)) for row in _rows(12)]
    assert np.mean(figures) > 37
    assert min(figures) > 32


@pytest.mark.parametrize("fidelity", ["fast", "exact"])
@pytest.mark.parametrize(("width", "height"), [(300, 225), (97, 310), (64, 64)])
def test_validation_is_torchvisions_bit_for_bit_whatever_training_is(
    decoder: str, fidelity: str, width: int, height: int
) -> None:
    data = encoded(photo(2, width, height), "JPEG", quality=90)
    view = _view("val", augment="crop_flip", fidelity=fidelity)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    expected = image if image.size == (64, 64) else v2.Compose([v2.Resize(73), v2.CenterCrop(64)])(image)
    assert view.num_uniforms == 0
    assert (_shown(view, data, np.empty(0)) == np.asarray(expected)).all()


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("fidelity", ["fast", "exact"])
def test_stored_pixels_and_a_lossless_file_show_the_same(augment: str, fidelity: str) -> None:
    view = _view(augment=augment, fidelity=fidelity)
    image = photo(3, 120, 90)
    pixels_HWC = np.asarray(image)
    pixels_HWC.flags.writeable = False  # as memory-mapped records are
    for row in _rows(8)[:, : view.num_uniforms]:
        assert (_shown(view, encoded(image, "PNG"), row) == _shown(view, pixels_HWC, row)).all()


@pytest.mark.parametrize("augment", AUGMENTS)
def test_threads_show_what_one_thread_shows(augment: str) -> None:
    data = encoded(photo(4, 200, 150), "JPEG")
    view = _view(augment=augment)
    rows = _rows(64)[:, : view.num_uniforms]
    alone = [_shown(view, data, row) for row in rows]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda row: _shown(view, data, row), rows))
    assert all((one == other).all() for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_truncated_file_is_unreadable(split: Split) -> None:
    data = encoded(photo(5, 200, 150), "JPEG")
    view = _view(split, augment="crop_flip")
    for row in _rows(5)[:, : view.num_uniforms]:
        with pytest.raises(UnreadableImageError, match="truncated"):
            _shown(view, data[: len(data) * 2 // 3], row)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 40), (3000, 2), (8, 8)])
def test_the_smallest_and_the_thinnest_images_are_shown(width: int, height: int) -> None:
    data = encoded(Image.new("RGB", (width, height), (200, 30, 90)), "JPEG", quality=100)
    for fidelity in ("fast", "exact"):
        view = _view(augment="crop_flip", fidelity=fidelity)
        for row in _rows(6):
            assert abs(_shown(view, data, row).astype(int) - (200, 30, 90)).max() <= 4
