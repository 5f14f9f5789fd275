"""`distill cache --publish`: a cache becomes a reinforced data set, which programs of others read.

Next to a teacher's rows it then has the images' names, and of each epoch how each image was augmented; around all, a README and a
program that reads them. docs/reinforced-data.md has the format.

Shapes: N samples of the training split.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.config import DataConfig, FillConfig, TrainConfig
from trainables.data.augment import AUGMENTS, crop_and_flip, padded_corners, uniforms
from trainables.data.decode import StoredImage, UnreadableImageError
from trainables.data.interface import Source
from trainables.data.order import rank_part
from trainables.data.storage.free_space import format_bytes
from trainables.device.color import WHITE, ColorJitter
from trainables.device.erasing import RandomErasing
from trainables.device.mixing import Mixing
from trainables.device.policies import POLICIES, Chain
from trainables.device.random_numbers import Draws
from trainables.distributed.group import Group, gather_objects
from trainables.metrics.heartbeat import Heartbeat
from trainables.rundir import write_atomic
from trainables.teachers.cache import CARD_TITLE, IMAGES
from trainables.teachers.cache.store import RowStore, arrow_file

READER = Path(__file__).with_name("read_targets.py")
AUGMENTATION = "augmentation.arrow"
_CPU = torch.device("cpu")


def publish(
    config: FillConfig, group: Group, source: Source, stores: Sequence[RowStore], num_epochs: int, heartbeat: Heartbeat
) -> None:
    """Write what a filled cache lacks to be read by others. Every rank calls it, and writes the augmentations of its epochs.

    Raises OSError: the disk is full.
    """
    paths = [[store.epoch_folder(epoch) / AUGMENTATION for store in stores] for epoch in range(num_epochs)]
    missing = gather_objects([n for n, files in enumerate(paths) if not all(file.exists() for file in files)], group)[0]
    sizes_N2 = _sizes(config, group, source, heartbeat) if missing else np.empty((0, 2), np.int64)
    operations = _operations(config.data)
    for epoch in missing[group.rank :: group.world_size]:
        heartbeat.beat()
        columns = augmentation_columns(config, sizes_N2, epoch)
        for store, path in zip(stores, paths[epoch], strict=True):
            write_atomic(path, arrow_file(columns, {**store.about, "operations": operations}).to_pybytes())
    gather_objects(None, group)  # all are there when rank 0 counts them
    if group.is_main:
        for store in stores:
            names = [source.name(sample).replace("\n", "\\n") for sample in range(len(source))]  # one line each
            write_atomic(store.folder / IMAGES, "".join(f"{name}\n" for name in names).encode(errors="surrogateescape"))
        folder = stores[0].folder.parent
        write_atomic(folder / READER.name, READER.read_bytes())
        write_atomic(folder / "README.md", card(folder).encode())


def augmentation_columns(config: TrainConfig, sizes_N2: NDArray[np.int64], epoch: int) -> dict[str, NDArray[Any]]:
    """How each image is augmented in an epoch, by the random numbers that training draws.

    `sizes_N2`: widths and heights, 0 of images that cannot be read. Boxes are (left, top, right, bottom).
    """
    data, device, size, num_samples = config.data, config.data.device_augment, config.data.image_size, len(sizes_N2)
    uniforms_NU = uniforms(config.seed, epoch, np.arange(num_samples), AUGMENTS[data.augment])
    draws, found = Draws(config.seed, epoch, torch.arange(num_samples)), dict[str, Any]()
    if data.augment == "crop_flip":
        crops = [
            crop_and_flip(uniforms_U, width, height, data.min_crop_area) if width else ((0, 0, 0, 0), False)
            for uniforms_U, (width, height) in zip(uniforms_NU, sizes_N2.tolist(), strict=True)
        ]
        dtype = np.int16 if sizes_N2.max(initial=0) < 2**15 else np.int32
        found["crop"], found["flip"] = np.array([box for box, _ in crops], dtype), np.array([flip for _, flip in crops])
    elif data.augment == "pad_crop_flip":
        corners_N2 = padded_corners(uniforms_NU)
        found["crop"], found["flip"] = np.hstack([corners_N2, corners_N2 + size]).astype(np.int16), uniforms_NU[:, 0] < 0.5
    if (policy := _policy(data)) is not None:
        kinds = policy.kinds(draws.uniforms("policy", policy.num_uniforms))
        found["operations"] = torch.stack([*kinds], dim=1).to(torch.int16)
    if device.color_jitter is not None:
        factors_N4, order_N4, changed_N = ColorJitter(device.color_jitter).factors(
            draws.uniforms("color_jitter", ColorJitter.num_uniforms)
        )
        found["jitter"] = torch.where(changed_N[:, None], factors_N4, torch.tensor([1.0, 1, 1, 0])).float()
        found["jitter_order"] = order_N4.argsort(dim=1).to(torch.uint8)
    if device.grayscale:
        found["gray"] = draws.uniforms("grayscale", 1)[:, 0] < device.grayscale
    if device.random_erasing:
        erasing = RandomErasing(device.random_erasing, data.mean, _CPU)
        found["erased"] = _box(erasing.boxes(draws.uniforms("random_erasing", erasing.num_uniforms), size, size))
    if device.mixes:
        mixing = Mixing(device.mixup, device.cutmix)
        share_N, boxes_N4 = mixing.shares(draws.uniforms("mixing", mixing.num_uniforms), size, size)
        found["own_share"], found["pasted"] = share_N.float(), _box(boxes_N4)
    columns = {name: np.asarray(values) for name, values in found.items()}
    return {name: values.astype(np.uint8) if values.dtype == bool else values for name, values in columns.items()}


def augmentation_bytes(config: TrainConfig, num_samples: int, num_epochs: int) -> int:
    """What `augmentation_columns` take on disk, but for headers."""
    columns = augmentation_columns(config, np.array([[1, 1]]), 0)
    return num_samples * num_epochs * len(config.all_teachers) * sum(values.nbytes for values in columns.values())


def card(folder: Path) -> str:
    """The README of a folder of reinforced data sets."""
    lines = [CARD_TITLE, "", "| folder | teacher | images | augmentations | stored | bytes |", "|---|---|---|---|---|---|"]
    for file in sorted(folder.glob(f"*/{IMAGES}")):
        about, epochs = json.loads((file.parent / "key.json").read_text()), sorted(file.parent.glob("epoch-*"))
        num_bytes = sum(path.stat().st_size for path in file.parent.rglob("*") if path.is_file())
        lines.append(
            f"| `{file.parent.name}` | {about['teacher']['model']} | {about['data']['samples']:,} | {len(epochs)} | "
            f"{about['stored']} | {format_bytes(num_bytes)} |"
        )
    return "\n".join([*lines, "", *_CARD]) + "\n"


_CARD = (
    "Each folder has a teacher's outputs for augmented images. They are logits, not probabilities, and have no temperature.",
    "`key.json` names the teacher (with the SHA-256 of its weights), the classes, the images (with a fingerprint of the set),",
    "the augmentation and its seed; `images.txt` has the file of each sample. Targets need pyarrow and torch, images",
    "torchvision too:",
    "",
    "```python",
    "from read_targets import ReinforcedFolder, read_targets",
    "",
    'targets, about = read_targets("FOLDER", epoch=0)             # targets["logits"]: (N, classes) float32',
    'dataset = ReinforcedFolder("IMAGES", "FOLDER", epoch=0)      # dataset[0]: an image (3, H, W) in [0, 1], and its targets',
    "```",
)


def unpublished_policy(data: DataConfig) -> str | None:
    """A policy whose draws `augmentation_columns` have no columns for."""
    policy = data.device_augment.policy
    return policy.name if policy is not None and not issubclass(POLICIES[policy.name], Chain) else None


def _policy(data: DataConfig) -> Chain | None:
    config = data.device_augment.policy
    policy = config and POLICIES[config.name](config, data.image_size, _CPU)
    return policy if isinstance(policy, Chain) else None


def _operations(data: DataConfig) -> list[tuple[str, float]]:
    """What each number of `operations` stands for: torchvision's name of an operation (and timm's SolarizeAdd), its magnitude."""
    policy = _policy(data)
    named = policy.operations.named if policy else []
    names = {name: name.title().replace("_", "").replace("Autoc", "AutoC") for name, _ in named}
    # torchvision refuses a threshold above the highest level, which changes nothing
    return [("Identity", 0.0) if name == "solarize" and amount > WHITE else (names[name], amount) for name, amount in named]


def _box(boxes_N4: torch.Tensor) -> torch.Tensor:
    """(top, left, bottom, right) as (left, top, right, bottom)."""
    return boxes_N4[:, [1, 0, 3, 2]].short()


def _sizes(config: FillConfig, group: Group, source: Source, heartbeat: Heartbeat) -> NDArray[np.int64]:
    """Width and height of every image (N, 2), 0 of those that cannot be read; each rank looks at its part of them."""
    if config.data.augment != "crop_flip":
        return np.zeros((len(source), 2), np.int64)

    def size(sample: int) -> tuple[int, int]:
        heartbeat.beat()
        try:
            image = StoredImage(source.read(sample))
        except UnreadableImageError:
            return 0, 0
        return image.width, image.height

    assert isinstance(config.data.loader_workers, int)
    with ThreadPoolExecutor(max(1, config.data.loader_workers)) as pool:
        own = list(pool.map(size, range(*rank_part(0, len(source), group.rank, group.world_size))))
    return np.array([size for part in gather_objects(own, group) for size in part], np.int64)
