"""Photos and packed sets, made on the spot: the machine has no network."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.gpu.contract import Settings
from tests.trainables.data.packed import pack_here
from tests.trainables.data.photos import photo
from trainables.data.pack.modes import Mode

SHARED_MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 * 2**30


def photo_folder(root: Path, count: int, distinct: int, width: int, height: int, suffix: str = "jpg") -> Path:
    """A folder of `count` images in ten classes, and ten to validate; of the same `distinct` files again and again."""
    if root.exists():
        return root
    made = root.with_name(root.name + ".tmp")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    files = [made / f"{number}.{suffix}" for number in range(distinct)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(_write, width=width, height=height), files, range(distinct)))
    for split, number_of in (("train", count), ("val", 10)):
        for number in range(number_of):
            folder = made / split / str(number % 10)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:06}.{suffix}").hardlink_to(files[number % distinct])
    for file in files:
        file.unlink()
    made.rename(root)
    return root


def _write(file: Path, seed: int, width: int, height: int) -> None:
    photo(seed, width, height).save(file, quality=95)


def fast_folder(settings: Settings) -> Path:
    """Memory that is a file system, where there is enough of it; else a folder of the run."""
    memory = SHARED_MEMORY / f"raydistill-gpu-checks-{os.getuid()}"
    roomy = SHARED_MEMORY.is_dir() and (memory.exists() or shutil.disk_usage(SHARED_MEMORY).free > ROOM_BYTES)
    folder = memory if roomy and not settings.small else settings.folder / "sets"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_all(settings: Settings) -> None:
    """Remove what pieces have made for each other."""
    shutil.rmtree(fast_folder(settings), ignore_errors=True)
    shutil.rmtree(settings.folder, ignore_errors=True)


def packed_photos(settings: Settings) -> Path:
    """Photos of about 500 × 375 pixels as a packed set of JPEG files."""
    return _packed(settings, "photos", 8192, Mode())


def raw_photos(settings: Settings) -> Path:
    """Fewer of them as pixels, 256 on the shorter side."""
    return _packed(settings, "few-photos", 1024, Mode(raw=16 if settings.small else 256))


def _packed(settings: Settings, name: str, count: int, mode: Mode) -> Path:
    folder = fast_folder(settings)
    dest = folder / f"{name}-packed"
    if not dest.exists():
        count, distinct, width, height = (32, 8, 40, 30) if settings.small else (count, 512, 500, 375)
        pack_here(photo_folder(folder / name, count, distinct, width, height), dest, mode)
    return dest


def cifar_files(settings: Settings) -> Path:
    """Images of 32 pixels as PNG files, as CIFAR is often kept."""
    count, distinct = (64, 32) if settings.small else (8192, 1024)
    return photo_folder(fast_folder(settings) / "cifar", count, distinct, 32, 32, "png")
