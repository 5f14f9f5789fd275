"""5: real images: the loader alone by its threads, and the whole loop beside data on the device."""

import contextlib
import sys
import time
from functools import partial
from pathlib import Path

import torch

from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.photos import cifar_files, packed_photos, raw_photos
from tests.gpu.timing import host_ms, seconds_of
from tests.gpu.work import R34_R18, Pair, Stepper, device_batch, first_device, job_config, open_job, sized
from trainables.config import DataConfig
from trainables.data.loader.loader import Loader
from trainables.data.source import open_source
from trainables.engine.train import run_job

THREADS = (1, 2, 4, 8, 12, 15)
PHOTOS = Pair(R34_R18.teacher, R34_R18.student, 224, 10)
SWITCH_MS = (5.0, 0.5, 0.1)


def loaded_per_s(path: Path, data: dict[str, object], threads: int, seconds: float, device: torch.device) -> float:
    """Images that a loader gives in a second when nobody trains on them."""
    config = DataConfig.model_validate({"path": str(path), "loader_workers": threads, **data})
    source = open_source(config, "train")
    with contextlib.closing(
        Loader(source, config, split="train", seed=0, rank=0, world_size=1, loader_workers=threads, device=device)
    ) as loader:
        for _ in loader.epoch(0):  # files are opened, pages are in memory
            break
        began, images, epoch = time.perf_counter(), 0, 1
        while (taken_s := time.perf_counter() - began) < seconds:
            for batch in loader.epoch(epoch):
                images += len(batch.labels_B)
                if (taken_s := time.perf_counter() - began) >= seconds:
                    break
            epoch += 1
    return images / taken_s


def photo_data(settings: Settings, batch: int) -> dict[str, object]:
    size = 8 if settings.small else 224
    return {"image_size": size, "global_batch_size": batch, "augment": "crop_flip"}


def by_threads(settings: Settings) -> Measured:
    """Packed JPEG files without training, by the number of loader threads."""
    device, path = first_device(settings), packed_photos(settings)
    batch, seconds = (8, 0.2) if settings.small else (256, 6.0)
    found: Measured = {}
    for threads in THREADS[:2] if settings.small else THREADS:
        found[f"images_per_s/{threads}"] = loaded_per_s(path, photo_data(settings, batch), threads, seconds, device)
    if not settings.small:
        found["linear to 8"] = float(found["images_per_s/8"]) / (8 * float(found["images_per_s/1"]))
        found["most"] = max(float(found[f"images_per_s/{threads}"]) for threads in THREADS)
    return found


def other_files(settings: Settings) -> Measured:
    """CIFAR as PNG files, and pixels, without training."""
    device = first_device(settings)
    seconds, threads = (0.2, 2) if settings.small else (6.0, 8)
    size = 16 if settings.small else 224
    cifar = {"image_size": 32, "global_batch_size": 8 if settings.small else 128, "augment": "pad_crop_flip"}
    raw = {"image_size": size, "global_batch_size": 8 if settings.small else 256, "augment": "crop_flip"}
    return {
        "cifar/1": loaded_per_s(cifar_files(settings), cifar, 1, seconds, device),
        "cifar": loaded_per_s(cifar_files(settings), cifar, threads, seconds, device),
        "raw": loaded_per_s(raw_photos(settings), raw, threads, seconds, device),
    }


def whole_loop(settings: Settings, batch: int) -> Measured:
    """The loop on packed JPEG files beside the same step on one batch on the device; and how long Python's lock is held."""
    device, pair = first_device(settings), sized(PHOTOS, settings)
    batch, threads = (8, 2) if settings.small else (batch, 8)
    steps = 2 if settings.small else 60
    data = photo_data(settings, batch) | {"path": str(packed_photos(settings)), "loader_workers": threads}
    found: Measured = {}
    with open_job(job_config(settings, pair, batch, "bf16"), device) as job:
        step = Stepper(job, device_batch(pair, batch, device))
        seconds_of(step, 2 if settings.small else 5, device)
        found["device_images_per_s"] = batch * steps / seconds_of(step, steps, device)
        found["host_ms/alone"] = host_ms(step, device)
    interval_s = sys.getswitchinterval()
    try:
        for switch_ms in SWITCH_MS:
            sys.setswitchinterval(switch_ms / 1e3)
            sections = {"data": data, "train": {"max_steps": steps, "log_every": 20, "warmup_steps": 1 if settings.small else 10}}
            with open_job(job_config(settings, pair, batch, "bf16", sections), device) as job:
                summary = run_job(job)
            found |= {
                f"images_per_s/{switch_ms:g}": summary["images_per_s"],
                f"data_pct/{switch_ms:g}": summary["data_pct"],
                f"h2d_ms/{switch_ms:g}": summary["phase/h2d_ms"],
                f"cpu_ms/{switch_ms:g}": summary.get("phase/cpu_ms", 0.0),
            }
    finally:
        sys.setswitchinterval(interval_s)
    found["of device data"] = float(found["images_per_s/5"]) / float(found["device_images_per_s"])
    found["host with loader"] = float(found["cpu_ms/5"]) / float(found["host_ms/alone"])
    return found


OF_LOOP = {
    256: (
        Expected("of device data", "real JPEG ÷ data on the device ≥ 0.97", low=0.97),
        Expected("data_pct/5", "data below 3 % of a step", high=3, estimate=True),
    ),
    64: (Expected("of device data", "÷ data on the device: recorded"), Expected("data_pct/5", "data in %: recorded")),
    32: (
        Expected("of device data", "÷ data on the device: recorded"),
        Expected("host with loader", "host time 1.5–3 × of that without a loader", 1.5, 3, estimate=True),
    ),
}
CHECK = Check(
    5,
    "Input",
    (
        Piece(
            "5-threads",
            by_threads,
            (
                Expected("images_per_s/1", "1,000–1,250 images/s a thread", 1000, 1250, estimate=True),
                Expected("linear to 8", "at least 85 % linear to 8 threads", low=0.85, estimate=True),
                Expected("most", "bends at 9,000–13,000 images/s", 9000, 13_000, estimate=True),
            ),
            5,
        ),
        Piece(
            "5-files",
            other_files,
            (
                Expected("cifar", "CIFAR as PNG: at most 12,000 images/s", high=12_000, estimate=True),
                Expected("raw", "pixels: more than 80,000 images/s", low=80_000, estimate=True),
            ),
            4,
        ),
        *(Piece(f"5-loop-{batch}", partial(whole_loop, batch=batch), expected, 4) for batch, expected in OF_LOOP.items()),
    ),
)
