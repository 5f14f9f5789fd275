"""6: `data.decoder: gpu`: alone, beside training, and its memory."""

import importlib.util
import time
from pathlib import Path

import torch

from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.photos import packed_photos
from tests.gpu.work import R34_R18, Pair, first_device, job_config, open_job, sized
from trainables.config import DataConfig
from trainables.data.loader.loader import Loader
from trainables.data.source import open_source
from trainables.device.decode import PACKAGE, region_decoder
from trainables.device.device_batches import on_device
from trainables.device.memory import release_device
from trainables.engine.train import run_job

PHOTOS = Pair(R34_R18.teacher, R34_R18.student, 224, 10)


def lacks_library(settings: Settings) -> str | None:
    """What has to be installed."""
    found = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvimgcodec")
    return None if found else f"pip install {PACKAGE}"


def decoded_per_s(path: Path, batch: int, threads: int, seconds: float, device: torch.device) -> float:
    """Images that are read, decoded and on the device in a second, without training."""
    size = 224 if device.type == "cuda" else 8
    tree = {"path": str(path), "image_size": size, "global_batch_size": batch, "augment": "crop_flip", "decoder": "gpu"}
    config = DataConfig.model_validate(tree | {"loader_workers": threads})
    source = open_source(config, "train")
    loader = Loader(source, config, split="train", seed=0, rank=0, world_size=1, loader_workers=threads, device=device)
    began, images, epoch = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds:
        for ready in on_device(loader.epoch(epoch), device):
            ready.wait()
            images += len(ready.labels_B)
        epoch += 1
    taken_s = time.perf_counter() - began
    loader.close()
    return images / taken_s


def decoder(settings: Settings) -> Measured:
    """Images/s alone; training beside training with the CPU's, by threads; what it holds after another number of threads."""
    device, pair, path = first_device(settings), sized(PHOTOS, settings), packed_photos(settings)
    batch, seconds, steps = (8, 0.2, 2) if settings.small else (256, 8.0, 40)
    found: Measured = {"images_per_s": decoded_per_s(path, batch, 8, seconds, device)}
    for threads in () if settings.small else (2, 8):  # the product refuses to train with it on a CPU
        for kind in ("auto", "gpu"):
            data = {"path": str(path), "augment": "crop_flip", "decoder": kind, "loader_workers": threads}
            sections = {"data": data, "train": {"max_steps": steps, "log_every": 20}}
            with open_job(job_config(settings, pair, batch, "bf16", sections), device) as job:
                found[f"{kind}/{threads}"] = run_job(job)["images_per_s"]
        found[f"gpu/auto at {threads}"] = float(found[f"gpu/{threads}"]) / float(found[f"auto/{threads}"])
        found["slower_pct"] = 100 * (1 - float(found[f"gpu/auto at {threads}"]))  # of the last, eight
    release_device(device)
    for threads in (2, 4):
        found[f"used_mib/{threads}"] = used_mib(device)
        decoded_per_s(path, batch, threads, seconds / 4, device)
        release_device(device)
    found["kept_mib"] = used_mib(device) - float(found["used_mib/2"])
    found["decoders kept"] = region_decoder.cache_info().currsize
    return found


def used_mib(device: torch.device) -> float:
    """Memory of the whole GPU that is taken."""
    if device.type == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


CHECK = Check(
    6,
    "Decoding on the GPU",
    (
        Piece(
            "6-gpu",
            decoder,
            (
                Expected("images_per_s", "alone: 5,000–9,000 images/s", 5000, 9000, estimate=True),
                Expected("gpu/auto at 2", "beside training, ÷ the CPU's two threads ≥ 1.5", low=1.5, estimate=True),
                Expected("slower_pct", "training 10–25 % slower than with the CPU's eight", 10, 25, estimate=True),
                Expected("decoders kept", "no decoder outlives its job", 0, 0, on_cpu=True),
                Expected("kept_mib", "memory after another number of threads ≤ 100 MiB more", high=100),
            ),
            4,
            lacks_library,
        ),
    ),
)
