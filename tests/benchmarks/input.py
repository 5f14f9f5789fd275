"""Images/s into the main process beside torchvision's ImageFolder + PIL + DataLoader, DALI and FFCV, and how near `fast` is.

2 threads, batches of 64, RandomResizedCrop(224) + flip, uint8. `--images FOLDER` holds JPEG files at any depth (without it:
pictures made up on the spot). `--dali-python` and `--ffcv-python` are Pythons that have them; without one its lines are left
out, with a word.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.transforms import functional as tv

from tests.benchmarks.peers.window import SIZE
from tests.benchmarks.process import ROOT, answer_of, environment
from tests.benchmarks.rounds import Bar, Comparison, Sides
from tests.trainables.data.photos import encoded, photo
from trainables.config import DataConfig
from trainables.data.augment import Augment, random_resized_crop_box, uniforms
from trainables.data.decode import decode_image

SECONDS, LEAST_FILES = 4.0, 2000
MAX_SIDE, QUALITY = 400, 90
RECORDS: dict[str, list[str]] = {
    "records": [],
    "records 400": ["--max-side", str(MAX_SIDE), "--quality", str(QUALITY)],
    "records raw": ["--raw", "256"],
}
FIDELITY_IMAGES = 300
PEERS = Path(__file__).parent / "peers"


@contextlib.contextmanager
def comparisons(
    short: bool, images: Path | None = None, dali_python: str | None = None, ffcv_python: str | None = None
) -> Iterator[list[Comparison]]:
    with tempfile.TemporaryDirectory() as name:
        root, least = Path(name), 128 if short else LEAST_FILES
        files = _files(images) if images else _made_up(root / "made_up", 80)
        originals = _folder(files, root / "originals", least)
        work = [str(0.5 if short else SECONDS)]
        sides = {
            "reference": _speed("reference", originals, work),
            "fast": _speed("fast", originals, work),
            "exact": _speed("exact", originals, work),
            "decoding": _speed("decoding", originals, work),
            "huffman": _speed("huffman", originals, work),
        }
        for title, how in RECORDS.items():
            sides[title] = _speed("fast", _packed(originals, root / title, how), work)
        if dali_python:
            sides["DALI"] = partial(answer_of, [str(PEERS / "dali_loader.py"), str(originals), *work], dali_python)
        else:
            print("input: no --dali-python PATH, so DALI is left out", flush=True)
        if ffcv_python:
            small = _folder(_again(files, root / "smaller", MAX_SIDE), root / "max400", least)
            as_ffcv = _folder(_again(files, root / "again", None), root / "q90", least)
            sides["fast q90"] = _speed("fast", as_ffcv, work)
            for title, folder in (("FFCV", originals), ("FFCV 400", small)):
                sides[title] = partial(answer_of, [str(PEERS / "ffcv_loader.py"), str(folder), *work], ffcv_python)
        else:
            print("input: no --ffcv-python PATH, so FFCV is left out", flush=True)
        costs = [_python_cost("records", root / "records", *work)]
        yield [*_speeds(Sides(sides), list(sides)), *costs, *_fidelities(files[:FIDELITY_IMAGES])]


def _speeds(sides: Sides, names: list[str]) -> Iterator[Comparison]:
    for title, ours, peer, bar in (
        ("fast / torchvision reference", "fast", "reference", 3.0),
        ("fast, records / torchvision reference", "records", "reference", 3.0),
        ("exact / torchvision reference", "exact", "reference", 1.9),
        (f"records of max side {MAX_SIDE} / torchvision reference on originals", "records 400", "reference", 6.0),
        ("records of 256 px, raw / torchvision reference on originals", "records raw", "reference", 10.0),
        ("fast, records / DALI CPU", "records", "DALI", 1.7),
        ("fast, records / FFCV, which re-encodes", "records", "FFCV", 1.7),
        ("fast, files re-encoded as FFCV's / FFCV", "fast q90", "FFCV", None),
        (f"records of max side {MAX_SIDE} / FFCV on its own", "records 400", "FFCV 400", 1.9),
        ("fast, records / its decoding alone", "records", "decoding", None),
        ("fast, records / its Huffman decoding alone", "records", "huffman", None),
        ("its Huffman decoding alone / torchvision reference", "huffman", "reference", None),
    ):
        if peer in names:
            yield Comparison(title, "images/s", sides.pair(ours, peer, "images_per_s"), Bar("≥", bar) if bar else None)


def _python_cost(title: str, packed: Path, seconds: str) -> Comparison:
    command = ["-m", "tests.benchmarks.image_cost", str(packed), "--seconds", seconds]
    sides = Sides({"in place": partial(answer_of, command), "warm": partial(answer_of, [*command, "--warm"])})
    return Comparison(
        f"CPU time of Python in a loader thread, an image, {title} (peer: with a decoder that does nothing)",
        "µs",
        sides.pair("in place", "warm", "python_us"),
        Bar("≤", 25.0),
        lambda ours, peer: ours,
        "ours",
    )


def _fidelities(files: list[Path]) -> Iterator[Comparison]:
    for fidelity, mean_db, fifth_db in (("fast", 39.0, 29.0), ("exact", 50.0, 50.0)):
        measured = cache(partial(_fidelity_db, files, fidelity))
        title = f"fidelity of {fidelity} to torchvision's crop, PSNR"
        yield Comparison(
            f"{title}: mean (peer: 5th percentile)",
            "dB",
            lambda _, measured=measured: measured(),
            Bar("≥", mean_db),
            _first,
            "mean",
        )
        yield Comparison(
            f"{title}: 5th percentile (ours: mean)",
            "dB",
            lambda _, measured=measured: measured(),
            Bar("≥", fifth_db),
            _second,
            "fifth",
        )


def _first(ours: float, peer: float) -> float:
    return ours


def _second(ours: float, peer: float) -> float:
    return peer


def _speed(name: str, folder: Path, work: list[str]) -> Callable[[], dict[str, float]]:
    return partial(answer_of, ["-m", "tests.benchmarks.loaders", name, str(folder), "--seconds", *work])


def _packed(folder: Path, dest: Path, how: list[str]) -> Path:
    command = [sys.executable, "-m", "service", "pack", str(folder), str(dest), *how]
    subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, check=True)
    return dest


def _fidelity_db(files: list[Path], fidelity: str) -> tuple[float, float]:
    """Mean and 5th percentile over one crop of each file, 20·log10(255/RMS of the difference) in dB."""
    augment = Augment(DataConfig.model_validate({"image_size": SIZE, "augment": "crop_flip", "fidelity": fidelity}), "train")
    figures = []
    for file, row in zip(files, uniforms(0, 0, np.arange(len(files)), augment.num_uniforms), strict=True):
        ours_HWC = np.empty((SIZE, SIZE, 3), dtype=np.uint8)
        data = file.read_bytes()
        augment.render(data, row, ours_HWC)
        augment.finish(row[None], ours_HWC[None])
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


def _again(files: list[Path], folder: Path, max_side: int | None) -> list[Path]:
    """The same images re-encoded, at most `max_side` pixels wide and high."""
    folder.mkdir()
    made = []
    for number, file in enumerate(files):
        image = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
        if max_side:
            image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
        made.append(folder / f"{number}.jpg")
        made[-1].write_bytes(encoded(image, "JPEG", quality=QUALITY))
    return made


def _folder(files: list[Path], root: Path, least: int) -> Path:
    """root/train/a/*: links to the files, over and over until there are enough for an epoch that is not all ends; one to val."""
    for split in ("train", "val"):
        (root / split / "a").mkdir(parents=True)
    os.symlink(files[0].absolute(), root / "val" / "a" / "0.jpg")
    for number in count():
        if number >= max(least, len(files)):
            return root
        os.symlink(files[number % len(files)].absolute(), root / "train" / "a" / f"{number:06}.jpg")
    raise AssertionError
