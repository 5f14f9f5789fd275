"""5: real images: the loader alone by its threads, and the whole loop beside data on the device."""

import contextlib
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from tests.benchmarks.peers.device_loops import Train, plain_train, torchvision_train
from tests.benchmarks.plain import MEAN, STD
from tests.gpu.check_speed import models
from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.photos import cifar_files, packed_photos, raw_photos
from tests.gpu.timing import host_ms, seconds_of, spread_pct, synchronize
from tests.gpu.work import R34_R18, Pair, Stepper, device_batch, first_device, job_config, open_job, release, sized
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


def beside_scripts(settings: Settings) -> Measured:
    """Images/s on photos from the files to the trained student: ours, from a packed set and from the folder, beside scripts whose
    torchvision loader has all cores, taking turns.
    """
    device, pair = first_device(settings), sized(PHOTOS, settings)
    batch, steps, rounds = (8, 2, 1) if settings.small else (256, 80, 2)
    packed = packed_photos(settings)
    folder = packed.with_name(packed.name.removesuffix("-packed"))
    workers = 2 if settings.small else max(1, (os.cpu_count() or 2) - 1)

    def ours(path: Path) -> float:
        data = photo_data(settings, batch) | {"path": str(path), "loader_workers": workers}
        sections = {"data": data, "train": {"max_steps": steps, "log_every": 20, "warmup_steps": 1 if settings.small else 20}}
        with open_job(job_config(settings, pair, batch, "bf16", sections), device) as job:
            return float(run_job(job)["images_per_s"])

    def script(craft: bool) -> float:
        networks = models(pair, device, channels_last=craft)
        train = plain_train(*networks, "bf16") if craft else torchvision_train(*networks, "bf16")
        loader = torch_loader(folder, pair.image_size, batch, workers, normalizes=not craft)
        return scripts_images_per_s(train, loader, device, steps, warm_up=1 if settings.small else 20)

    sides = {
        "ours": partial(ours, packed),
        "ours from files": partial(ours, folder),
        "plain": partial(script, True),
        "torchvision": partial(script, False),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            taken[name].append(side())
            release(device)
    found = Measured({f"images_per_s/{name}": statistics.median(speeds) for name, speeds in taken.items()})
    found |= {f"spread_pct/{name}": spread_pct(speeds) for name, speeds in taken.items()}
    for peer in ("plain", "torchvision"):
        found[f"ours/{peer}"] = float(found["images_per_s/ours"]) / float(found[f"images_per_s/{peer}"])
    return found


def torch_loader(folder: Path, size: int, batch: int, workers: int, *, normalizes: bool) -> DataLoader[Any]:
    """As torchvision's reference loads a folder; or its pixels as they are, for a script that normalizes them on the device."""
    steps: list[Any] = [
        transforms.RandomResizedCrop(size, antialias=True),
        transforms.RandomHorizontalFlip(),
        transforms.PILToTensor(),
    ]
    if normalizes:
        steps += [
            transforms.ConvertImageDtype(torch.float32),
            transforms.Normalize(MEAN.flatten().tolist(), STD.flatten().tolist()),
        ]
    images = ImageFolder(str(folder / "train"), transforms.Compose(steps))
    return DataLoader(
        images,
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=True,
    )


def scripts_images_per_s(train: Train, loader: DataLoader[Any], device: torch.device, steps: int, *, warm_up: int) -> float:
    """Over so many steps after `warm_up` of them, epoch after epoch."""
    count, began = 0, 0.0
    while True:
        for images, labels in loader:
            images = images.to(device, non_blocking=True)
            if images.dtype == torch.uint8:
                images = images.contiguous(memory_format=torch.channels_last)
            train(images, labels.to(device, non_blocking=True))
            count += 1
            if count == warm_up:
                synchronize(device)
                began = time.perf_counter()
            if count == warm_up + steps:
                synchronize(device)
                return steps * len(labels) / (time.perf_counter() - began)


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
        Piece(
            "5-scripts",
            beside_scripts,
            (
                Expected("ours/torchvision", "files to student ÷ torchvision's reference with a teacher ≥ 1.5", low=1.5),
                Expected("ours/plain", "÷ plain loop with torchvision's loader ≥ 1.0", low=1.0),
                Expected("images_per_s/ours", "images/s: recorded"),
                Expected("images_per_s/ours from files", "images/s without packing: recorded"),
            ),
            4,
        ),
        *(Piece(f"5-loop-{batch}", partial(whole_loop, batch=batch), expected, 4) for batch, expected in OF_LOOP.items()),
    ),
)
