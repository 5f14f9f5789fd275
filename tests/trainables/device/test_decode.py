"""Crops decoded on the device: the code of the GPU, run by each library's decoder for the CPU; and, where there is one, a GPU."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from service.config.experiment import load
from tests.trainables.data.photos import MakeFolder, encoded, photo
from tests.trainables.data.test_decoders import JPEGS, _boxes, _damaged
from trainables.config import DataConfig
from trainables.data.augment import AUGMENTS, Augment, render_crop, uniforms
from trainables.data.decode import StoredImage, UnreadableImageError
from trainables.data.jpeg import Box, Region, read_header
from trainables.data.loader.loader import Loader
from trainables.data.source import open_source
from trainables.data.turbojpeg import TurboJpeg, open_decoder
from trainables.device import decode as device_decode
from trainables.device.decode import RegionDecoder, check_decoder, decode_regions, make_decoder
from trainables.device.device_batches import DeviceBatch, on_device
from trainables.errors import DataError, ExperimentError
from trainables.failures import kind_of

CPU = torch.device("cpu")
SIZE = 48
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def library() -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="data.decoder: gpu is not installed", exc_type=ImportError)


@pytest.fixture
def decoder(library: None) -> RegionDecoder:
    return make_decoder(CPU, 1)


class Nothing:
    """A decoder that decodes nothing."""

    def decode(self, regions: list[Region]) -> list[torch.Tensor | None]:
        return [None] * len(regions)


def _region(row: int, data: bytes, box: Box, flip: bool = False) -> Region:
    header = read_header(data)
    assert header is not None
    return Region(row, data, header, box, flip)


def _room(rows: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.full((rows, SIZE, SIZE, 3), 77, dtype=torch.uint8, device=device).permute(0, 3, 1, 2)


def _exact(data: bytes, box: Box, flip: bool = False, decoder: TurboJpeg | None = None) -> np.ndarray:
    """The crop as `fidelity: exact` shows it, which test_augment.py holds against torchvision."""
    out_HWC = np.empty((SIZE, SIZE, 3), dtype=np.uint8)
    render_crop(StoredImage(data, decoder), box, flip, out_HWC, exact=True)
    return out_HWC


def _shown(images_BCHW: torch.Tensor) -> np.ndarray:
    return images_BCHW.permute(0, 2, 3, 1).cpu().numpy()


def _psnr_db(left: np.ndarray, right: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(((left.astype(float) - right) ** 2).mean(), 1e-3)))


def _mixed(root: Path) -> None:
    """Files that no GPU is asked for, among a folder's JPEGs: PNG, CMYK, RGB inside a JPEG, no image at all."""
    (root / "train" / "a" / "000.jpg").write_bytes(encoded(photo(50), "PNG"))
    (root / "train" / "a" / "003.jpg").write_bytes(encoded(photo(51).convert("CMYK"), "JPEG"))
    (root / "train" / "b" / "001.jpg").write_bytes(encoded(photo(52), "JPEG", keep_rgb=True))
    (root / "train" / "b" / "004.jpg").write_text("<html>")


def _without_pixels(data: bytes) -> bytes:
    """A file whose header is whole, and that ends where its pixels should begin."""
    return data[: data.index(b"\xff\xda")] + b"\xff\xd9"


def _config(root: Path, decoder: str, **changes: object) -> DataConfig:
    return DataConfig.model_validate(
        {
            "path": str(root),
            "image_size": SIZE,
            "global_batch_size": 6,
            "augment": "crop_flip",
            "last_batch": "short",
            "max_bad": 0.3,
            "decoder": decoder,
            **changes,
        }
    )


def _loader(data: DataConfig, rank: int = 0, world: int = 1, workers: int = 0, device: torch.device = CPU) -> Loader:
    return Loader(
        open_source(data, "train"),
        data,
        split="train",
        seed=11,
        rank=rank,
        world_size=world,
        loader_workers=workers,
        device=device,
    )


def _epoch(loader: Loader, device: torch.device = CPU, start: int = 0) -> Iterator[DeviceBatch]:
    """An epoch's batches, which outlive the loader's memory; then the loader is closed."""
    for batch in on_device(loader.epoch(2, start), device, 2):
        batch.wait()
        yield batch._replace(
            images_BCHW=batch.images_BCHW.clone(), labels_B=batch.labels_B.clone(), views_B=batch.views_B.clone()
        )
    loader.close()


def _pixels(batches: Iterator[DeviceBatch]) -> dict[int, np.ndarray]:
    """Sample → pixels (H, W, C)."""
    return {
        index: image
        for batch in batches
        for index, image in zip(batch.indices_B.tolist(), _shown(batch.images_BCHW), strict=True)
    }


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("kind", JPEGS)
def test_a_crop_is_the_exact_one_within_a_rounding(decoder: RegionDecoder, kind: str, flip: bool) -> None:
    boxes = [box for box in _boxes(149, 115, 40) if box[2] - box[0] > 4 and box[3] - box[1] > 4]
    images_BCHW = _room(len(boxes))
    regions = [_region(row, JPEGS[kind], box, flip) for row, box in enumerate(boxes)]
    assert decode_regions(decoder, regions, images_BCHW) == {}
    for shown_HWC, box in zip(_shown(images_BCHW), boxes, strict=True):
        expected_HWC = _exact(JPEGS[kind], box, flip)
        assert abs(shown_HWC.astype(int) - expected_HWC).max() <= 1, box
        assert _psnr_db(shown_HWC, expected_HWC) > 50, box


def test_every_crop_stands_in_its_row_and_other_rows_stay_as_they_are(decoder: RegionDecoder) -> None:
    images_BCHW = _room(7)
    boxes = {5: (0, 0, 100, 90), 0: (20, 10, 90, 100), 3: (5, 5, 6, 6)}
    assert decode_regions(decoder, [_region(row, JPEGS["4:2:0"], box) for row, box in boxes.items()], images_BCHW) == {}
    for row, shown_HWC in enumerate(_shown(images_BCHW)):
        expected_HWC = _exact(JPEGS["4:2:0"], boxes[row]) if row in boxes else np.full_like(shown_HWC, 77)
        assert abs(shown_HWC.astype(int) - expected_HWC).max() <= 1


def test_a_batch_that_is_decoded_in_parts_is_the_same(decoder: RegionDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = [_region(row, JPEGS["4:4:4"], box) for row, box in enumerate(_boxes(149, 115, 30))]
    whole_BCHW, parts_BCHW = _room(len(regions)), _room(len(regions))
    decode_regions(decoder, regions, whole_BCHW)
    monkeypatch.setattr(device_decode, "_MAX_PIXELS", 5_000)
    assert 3 < len(list(device_decode._parts(regions))) < len(regions)
    decode_regions(decoder, regions, parts_BCHW)
    assert torch.equal(whole_BCHW, parts_BCHW)


def test_what_the_decoder_fails_at_is_decoded_as_elsewhere_or_named(decoder: RegionDecoder) -> None:
    whole, box = JPEGS["4:2:0"], (10, 10, 120, 100)
    files = [data for data in _damaged(12) if (header := read_header(data)) and header.ycbcr and header[:2] == (149, 115)]
    files += [_without_pixels(whole), whole[: len(whole) // 2] + b"\xff\xd9", whole]
    images_BCHW = _room(len(files))
    bad = decode_regions(decoder, [_region(row, data, box) for row, data in enumerate(files)], images_BCHW)
    alone = decoder.decode([_region(0, data, box) for data in files])
    assert any(pixels is None for pixels in alone)
    assert "truncated" in bad[len(files) - 3]
    for row, (data, pixels, shown_HWC) in enumerate(zip(files, alone, _shown(images_BCHW), strict=True)):
        if pixels is not None:
            assert row not in bad
        elif row in bad:
            with pytest.raises(UnreadableImageError):
                _exact(data, box, decoder=open_decoder())
        else:
            assert (shown_HWC == _exact(data, box, decoder=open_decoder())).all()
    assert abs(_shown(images_BCHW)[-1].astype(int) - _exact(whole, box)).max() <= 1


def test_what_no_device_decodes_is_cropped_on_the_cpu_or_named() -> None:
    whole, box = JPEGS["4:2:0"], (10, 10, 120, 100)
    images_BCHW = _room(3)
    regions = [_region(0, whole, box, flip=True), _region(2, whole, box), _region(1, _without_pixels(whole), box)]
    bad = decode_regions(Nothing(), regions, images_BCHW)
    assert bad.keys() == {1}
    assert "truncated" in bad[1]
    for row, flip in ((0, True), (2, False)):
        assert np.array_equal(_shown(images_BCHW)[row], _exact(whole, box, flip))


def test_batches_of_any_size_are_decoded(decoder: RegionDecoder) -> None:
    boxes = _boxes(149, 115, 300)
    regions = [_region(row, JPEGS["4:4:4"], box) for row, box in enumerate(boxes)]
    expected = [StoredImage(region.data).part(region.box) for region in regions]
    pairs = list[tuple[torch.Tensor | None, np.ndarray]]()
    for count in (300, 0, 1, 129, 128, 3):
        decoded = decoder.decode(regions[:count])
        assert len(decoded) == count
        pairs += zip(decoded, expected[:count], strict=True)
    for pixels, expected_HWC in pairs:  # also those of the first run, after the last
        assert pixels is not None
        assert (pixels.numpy() == expected_HWC).all()
    assert decode_regions(decoder, [], _room(0)) == {}


def test_a_file_that_stops_the_decoder_costs_no_other_file_its_place(decoder: RegionDecoder) -> None:
    """Its header is whole, but it cannot be decoded: where a library tells of no other file then, these go to the CPU."""
    whole, box = JPEGS["4:2:0"], (10, 10, 120, 100)
    bad_code = bytearray(whole)
    table = whole.index(b"\xff\xc4") + 5
    bad_code[table : table + 16] = b"\xff" * 16
    for number in (0, 2, 4):
        files = [whole] * 5
        files[number] = bytes(bad_code)
        images_BCHW = _room(5)
        bad = decode_regions(decoder, [_region(row, data, box) for row, data in enumerate(files)], images_BCHW)
        assert bad.keys() == {number}
        assert "damaged" in bad[number]
        for row in set(range(5)) - bad.keys():
            assert abs(_shown(images_BCHW)[row].astype(int) - _exact(whole, box)).max() <= 1
    assert all(pixels is not None for pixels in decoder.decode([_region(0, whole, box)] * 3))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaders_batches_are_those_of_exact_decoding_on_the_cpu(make_folder: MakeFolder, library: None, workers: int) -> None:
    root = make_folder(train={"a": 9, "b": 8}, val={"a": 1})
    _mixed(root)
    exact, ours = (_loader(data, workers=workers) for data in (_config(root, "auto", fidelity="exact"), _config(root, "gpu")))
    assert (ours.decoder, exact.decoder in ("turbojpeg", "pil")) == ("gpu", True)
    for one, other in zip(_epoch(ours), _epoch(exact), strict=True):
        assert torch.equal(one.indices_B, other.indices_B)
        assert torch.equal(one.labels_B, other.labels_B)
        assert (one.position, one.epoch) == (other.position, other.epoch)
        assert (one.images_BCHW.dtype, one.images_BCHW.shape) == (torch.uint8, (len(one.labels_B), 3, SIZE, SIZE))
        assert one.images_BCHW.is_contiguous(memory_format=torch.channels_last)
        assert abs(_shown(one.images_BCHW).astype(int) - _shown(other.images_BCHW)).max() <= 1
    assert ours.skipped == exact.skipped == {13: "train/b/004.jpg (not an image)"}


def test_only_ordinary_jpegs_are_left_to_the_device(make_folder: MakeFolder, library: None) -> None:
    root = make_folder(train={"a": 9, "b": 8}, val={"a": 1})
    _mixed(root)
    loader = _loader(_config(root, "gpu"))
    left = [
        int(batch.indices_B[region.row])
        for batch in loader.epoch(2)
        if batch.encoded_rows is not None
        for region in batch.encoded_rows.regions
    ]
    assert sorted(left) == sorted(set(range(17)) - {0, 3, 10, 13})


def test_pixels_do_not_depend_on_threads_or_world_size(make_folder: MakeFolder, library: None) -> None:
    root = make_folder(train={"a": 9, "b": 8}, val={"a": 1})
    _mixed(root)
    data = _config(root, "gpu")
    expected = _pixels(_epoch(_loader(data)))
    assert len(expected) == 16
    for world, workers in ((1, 3), (2, 0), (3, 2)):
        found: dict[int, np.ndarray] = {}
        for rank in range(world):
            found |= _pixels(_epoch(_loader(data, rank, world, workers)))
        assert found.keys() == expected.keys()
        assert all((found[index] == expected[index]).all() for index in expected)


def test_an_epoch_goes_on_where_it_was_left(make_folder: MakeFolder, library: None) -> None:
    data = _config(make_folder(train={"a": 9, "b": 8}, val={"a": 1}), "gpu")
    whole = list(_epoch(_loader(data)))
    assert [len(batch.labels_B) for batch in whole] == [6, 6, 5]
    rest = list(_epoch(_loader(data), start=whole[0].position))
    assert [batch.position for batch in rest] == [12, 17]
    for one, other in zip(rest, whole[1:], strict=True):
        assert torch.equal(one.indices_B, other.indices_B)
        assert torch.equal(one.images_BCHW, other.images_BCHW)


def test_an_image_that_turns_out_to_be_none_is_left_out_named_and_counted(make_folder: MakeFolder, library: None) -> None:
    root = make_folder(train={"a": 9, "b": 8}, val={"a": 1})
    expected = _pixels(_epoch(_loader(_config(root, "gpu"))))
    for bad in ("a/002.jpg", "b/005.jpg"):
        file = root / "train" / bad
        file.write_bytes(_without_pixels(file.read_bytes()))
    loader = _loader(_config(root, "gpu"))
    found = _pixels(_epoch(loader))
    assert found.keys() == expected.keys() - {2, 14}
    assert all((found[index] == expected[index]).all() for index in found)
    assert sorted(loader.skipped) == [2, 14]
    assert all("truncated" in reason for reason in loader.skipped.values())
    strict = _loader(_config(root, "gpu", max_bad=0.1))
    with pytest.raises(DataError, match=r"2 unreadable images in one epoch, more than the 1 of 17"):
        list(_epoch(strict))


def test_validation_is_decoded_on_the_cpu(make_folder: MakeFolder, library: None) -> None:
    root = make_folder(train={"a": 2}, val={"a": 5})
    data = _config(root, "gpu")
    loader = Loader(open_source(data, "val"), data, split="val", seed=0, rank=0, world_size=1, loader_workers=0)
    assert loader.decoder in ("turbojpeg", "pil")
    assert all(batch.encoded_rows is None for batch in loader.epoch(0))


def test_a_very_large_image_is_left_to_the_cpu() -> None:
    augment = Augment(DataConfig(decoder="gpu", augment="crop_flip", image_size=SIZE), "train")
    row_U = uniforms(0, 0, np.arange(1), AUGMENTS["crop_flip"])[0]
    data = JPEGS["4:4:4"]
    at = data.index(b"\xff\xc0")
    large = data[: at + 5] + (5000).to_bytes(2, "big") * 2 + data[at + 9 :]
    assert augment.region(0, data, row_U) is not None
    assert augment.region(0, large, row_U) is None
    assert augment.region(0, np.asarray(Image.open(io.BytesIO(data))), row_U) is None


def test_a_devices_decoder_without_a_gpu_or_without_crops_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match=r"^data\.decoder: gpu needs a worker with a GPU, .*; write data\.decoder=auto$"):
        check_decoder(DataConfig(decoder="gpu", augment="crop_flip"), CPU, 1)
    check_decoder(DataConfig(), CPU, 1)
    with pytest.raises(ExperimentError, match=r"data\.decoder gpu does not go with data\.augment pad_crop_flip"):
        load("digits", ["data.decoder=gpu", "data.augment=pad_crop_flip"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this node could")
def test_a_node_that_cannot_decode_is_refused_in_one_line() -> None:
    message = r"^data\.decoder: gpu cannot be used on this node \(.*\); pip install nvidia-.*, or write data\.decoder=auto$"
    with pytest.raises(DataError, match=message) as caught:
        check_decoder(DataConfig(decoder="gpu", augment="crop_flip"), torch.device("cuda", 0), 1)
    assert "\n" not in str(caught.value)


def test_a_gpu_without_room_for_a_decoder_is_out_of_memory_and_no_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(device: torch.device, threads: int) -> RegionDecoder:
        raise RuntimeError("CUDA Runtime failure: '#2' at /opt/src/python/decoder.cpp:101")

    monkeypatch.setattr(device_decode, "make_decoder", no_room)
    with pytest.raises(RuntimeError, match="CUDA Runtime failure") as caught:
        check_decoder(DataConfig(decoder="gpu", augment="crop_flip"), torch.device("cuda", 7), 1)
    assert kind_of(caught.value) == "out_of_memory"


def test_a_decoder_that_decodes_is_distinguished_from_one_that_does_not(decoder: RegionDecoder) -> None:
    assert device_decode._decodes(decoder)
    assert not device_decode._decodes(Nothing())


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("kind", sorted(JPEGS.keys() - {"rgb inside"}))
def test_a_gpus_crops_are_near_to_the_exact_ones(library: None, kind: str) -> None:
    device = torch.device("cuda", 0)
    boxes = [box for box in _boxes(149, 115, 40) if box[2] - box[0] > 4 and box[3] - box[1] > 4]
    regions = [_region(row, JPEGS[kind], box, row % 2 == 1) for row, box in enumerate(boxes)]
    decoder = make_decoder(device, 2)
    decoded = decoder.decode(regions)
    torch.cuda.synchronize()
    assert all(pixels is not None and pixels.is_cuda for pixels in decoded)  # nothing is left to the CPU
    images_BCHW = _room(len(boxes), device)
    assert decode_regions(decoder, regions, images_BCHW) == {}
    figures = [
        _psnr_db(shown_HWC, _exact(region.data, region.box, region.flip))
        for shown_HWC, region in zip(_shown(images_BCHW), regions, strict=True)
    ]
    assert np.mean(figures) > 40
    assert min(figures) > 30


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_a_gpus_batches_are_complete_and_near_to_the_exact_ones(make_folder: MakeFolder, library: None, workers: int) -> None:
    device = torch.device("cuda", 0)
    root = make_folder(train={"a": 60, "b": 50}, val={"a": 1})
    _mixed(root)
    file = root / "train" / "a" / "007.jpg"
    file.write_bytes(_without_pixels(file.read_bytes()))
    check_decoder(_config(root, "gpu"), device, 2)
    exact = _loader(_config(root, "auto", fidelity="exact"), workers=workers)
    ours = _loader(_config(root, "gpu"), workers=workers, device=device)
    expected, found = _pixels(_epoch(exact)), {}
    for batch in on_device(ours.epoch(2), device, 2):
        batch.wait()
        torch.cuda._sleep(20_000_000)  # a slow step: what is decoded meanwhile must not touch its batch
        found |= dict(zip(batch.indices_B.tolist(), _shown(batch.images_BCHW), strict=True))
    ours.close()
    assert found.keys() == expected.keys()
    assert sorted(ours.skipped) == sorted(exact.skipped)
    assert np.mean([_psnr_db(found[index], expected[index]) for index in found]) > 40


@pytest.mark.gpu
@on_a_gpu
def test_closing_early_ends_the_decoding_thread(make_folder: MakeFolder, library: None) -> None:
    device = torch.device("cuda", 0)
    loader = _loader(_config(make_folder(train={"a": 60}, val={"a": 1}), "gpu"), workers=2, device=device)
    batches = on_device(loader.epoch(0), device)
    next(batches).wait()
    batches.close()
    loader.close()
    torch.cuda.synchronize()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]
