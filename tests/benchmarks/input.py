"""Images/s into the main process beside torchvision's ImageFolder + PIL + DataLoader, DALI and FFCV, and how near `fast` is.

2 threads, batches of 64, RandomResizedCrop(224) + flip, uint8. `--images FOLDER` holds JPEG files at any depth (without it:
pictures made up on the spot). `--dali-python` and `--ffcv-python` are Pythons that have them; without one its lines are left
out, with a word.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.transforms import functional as tv

from tests.benchmarks.peers.window import SIZE
from tests.benchmarks.process import answer_of
from tests.benchmarks.rounds import Bar, Comparison, in_turn
from tests.trainables.data.photos import encoded, photo
from trainables.config import DataConfig
from trainables.data.augment import random_resized_crop_box, uniforms
from trainables.data.decode import decode_image
from trainables.data.view import View

SECONDS, LEAST_FILES = 6.0, 4000
MAX_SIDE, QUALITY = 400, 90
FIDELITY_IMAGES = 300
PEERS = Path(__file__).parent / "peers"


@contextlib.contextmanager
def comparisons(
    short: bool, images: Path | None = None, dali_python: str | None = None, ffcv_python: str | None = None
) -> Iterator[list[Comparison]]:
    with tempfile.TemporaryDirectory() as name:
        files = _files(images) if images else _made_up(Path(name) / "made_up", 80)
        originals = _folder(files, Path(name) / "originals", 128 if short else LEAST_FILES)
        small = _folder(_smaller(files, Path(name) / "smaller"), Path(name) / "max400", 128 if short else LEAST_FILES)
        yield list(_lines(files, originals, small, 0.5 if short else SECONDS, dali_python, ffcv_python))


def _lines(
    files: list[Path], originals: Path, small: Path, seconds: float, dali_python: str | None, ffcv_python: str | None
) -> Iterator[Comparison]:
    side = partial(_speed, seconds=seconds)
    peer = side("reference", originals)
    for title, ours, bar in (
        ("fast", side("fast", originals), 3.0),
        ("exact", side("exact", originals), 1.9),
        (f"fast, max side {MAX_SIDE} re-encoded", side("fast", small), 6.0),
    ):
        yield Comparison(f"{title} / torchvision reference on originals", "images/s", in_turn(ours, peer), Bar("≥", bar))
    for part, name in (("its decoding alone", "decoding"), ("its Huffman decoding alone", "huffman")):
        yield Comparison(f"fast / {part}", "images/s", in_turn(side("fast", originals), side(name, originals)), None)
    if dali_python:
        dali = [str(PEERS / "dali_loader.py"), str(originals), str(seconds)]
        yield Comparison(
            "fast / DALI CPU", "images/s", in_turn(side("fast", originals), _foreign(dali_python, dali)), Bar("≥", 1.7)
        )
    else:
        print("input: no --dali-python PATH, so DALI is left out", flush=True)
    if ffcv_python:
        for title, folder, bar in (("originals", originals, 1.7), (f"max side {MAX_SIDE}", small, 1.9)):
            ffcv = [str(PEERS / "ffcv_loader.py"), str(folder), str(seconds)]
            ours_and_ffcv = in_turn(side("fast", folder), _foreign(ffcv_python, ffcv))
            yield Comparison(f"fast / FFCV, {title}", "images/s", ours_and_ffcv, Bar("≥", bar))
    else:
        print("input: no --ffcv-python PATH, so FFCV is left out", flush=True)
    for fidelity, mean_db, fifth_db in (("fast", 39.0, 29.0), ("exact", 50.0, 50.0)):
        measured = cache(partial(_fidelity_db, files[:FIDELITY_IMAGES], fidelity))
        title = f"fidelity of {fidelity} to torchvision's crop, PSNR"
        yield Comparison(f"{title}: mean (peer: 5th percentile)", "dB", lambda _, measured=measured: measured(),
                         Bar("≥", mean_db), _first, "mean")  # fmt: skip
        yield Comparison(f"{title}: 5th percentile (ours: mean)", "dB", lambda _, measured=measured: measured(),
                         Bar("≥", fifth_db), _second, "fifth")  # fmt: skip


def _first(ours: float, peer: float) -> float:
    return ours


def _second(ours: float, peer: float) -> float:
    return peer


def _speed(name: str, folder: Path, seconds: float) -> Callable[[], float]:
    command = ["-m", "tests.benchmarks.loaders", name, str(folder), "--seconds", str(seconds)]
    return lambda: answer_of(command)["images_per_s"]


def _foreign(python: str, command: list[str]) -> Callable[[], float]:
    return lambda: answer_of(command, python)["images_per_s"]


def _fidelity_db(files: list[Path], fidelity: str) -> tuple[float, float]:
    """Mean and 5th percentile over one crop of each file, 20·log10(255/RMS of the difference) in dB."""
    view = View(DataConfig.model_validate({"image_size": SIZE, "augment": "crop_flip", "fidelity": fidelity}), "train")
    figures = []
    for file, row in zip(files, uniforms(0, 0, np.arange(len(files)), view.num_uniforms), strict=True):
        ours_HWC = np.empty((SIZE, SIZE, 3), dtype=np.uint8)
        data = file.read_bytes()
        view.into(data, row, ours_HWC)
        view.finish(row[None], ours_HWC[None])
        image = decode_image(data)
        left, top, right, bottom = random_resized_crop_box(row[1:], *image.size)
        crop = tv.resized_crop(image, top, left, bottom - top, right - left, [SIZE, SIZE])
        exact_HWC = np.asarray(tv.hflip(crop) if row[0] < 0.5 else crop)
        mean_square = ((ours_HWC.astype(np.float64) - exact_HWC) ** 2).mean()
        figures.append(10 * np.log10(255**2 / max(mean_square, 1e-2)))
    return float(np.mean(figures)), float(np.percentile(figures, 5))


def _files(images: Path) -> list[Path]:
    files = sorted(path for path in images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"input: {images} holds no .jpg or .jpeg files")
    return files


def _made_up(folder: Path, how_many: int) -> list[Path]:
    folder.mkdir()
    files = [folder / f"{number}.jpg" for number in range(how_many)]
    for number, file in enumerate(files):
        photo(number, 500, 375).save(file, quality=90)
    return files


def _smaller(files: list[Path], folder: Path) -> list[Path]:
    """The same images at most `MAX_SIDE` pixels wide and high."""
    folder.mkdir()
    made = []
    for number, file in enumerate(files):
        image = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
        image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
        made.append(folder / f"{number}.jpg")
        made[-1].write_bytes(encoded(image, "JPEG", quality=QUALITY))
    return made


def _folder(files: list[Path], root: Path, least: int) -> Path:
    """root/train/a/*: links to the files, over and over until there are enough for an epoch that is not all ends."""
    (root / "train" / "a").mkdir(parents=True)
    for number in count():
        if number >= max(least, len(files)):
            return root
        os.symlink(files[number % len(files)].absolute(), root / "train" / "a" / f"{number:06}.jpg")
    raise AssertionError
