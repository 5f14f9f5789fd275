"""Which images, how they are augmented, and how they reach a worker."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from trainables.config.section import Count, ImageSize, Mean, Natural, NonNegative, Probability, Section, Std

ON_DEVICE = ("gpu", "dali")
"""What `data.decoder` may be that decodes on the device, see `trainables.device.decoders`."""


class RandAugmentConfig(Section):
    """RandAugment with torchvision's operations."""

    num_ops: Annotated[Count, Field(le=16)] = Field(2, description="operations on each image")
    magnitude: Annotated[Natural, Field(le=30)] = Field(9, description="of each operation, 0 to 30")


class ColorJitterConfig(Section):
    """How far colors may be changed: factors from 1 - value to 1 + value, hue by a part of the color circle."""

    brightness: NonNegative = Field(0.0, description="factors from 1 - value to 1 + value")
    contrast: NonNegative = Field(0.0, description="factors from 1 - value to 1 + value")
    saturation: NonNegative = Field(0.0, description="factors from 1 - value to 1 + value")
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.0, description="part of the color circle, to either side")
    probability: Probability = Field(1.0, description="share of the images that are changed")


class DeviceAugmentConfig(Section):
    """Training augmentation of whole batches on the device, in this order; absent or 0 is off."""

    randaugment: RandAugmentConfig | None = None
    color_jitter: ColorJitterConfig | None = None
    grayscale: Probability = Field(0.0, description="probability that an image loses its colors")
    random_erasing: Probability = Field(0.0, description="probability that a rectangle of an image becomes the mean color")
    mixup: NonNegative = Field(0.0, description="α of the shares of two mixed images, from Beta(α, α)")
    cutmix: NonNegative = Field(0.0, description="α of the shares of two pasted images; with mixup, each image draws which")

    @property
    def mixes(self) -> bool:
        """Whether an image may be mixed with one of another class."""
        return self.mixup > 0 or self.cutmix > 0


class MoreDataConfig(Section):
    """A further set of training images."""

    path: str = Field(min_length=1, description="as data.path; validation images that it has are not used")
    share: Annotated[float, Field(gt=0, lt=1)] = Field(description="part of each global batch; data.path has the rest")
    labels: bool | None = Field(
        None,
        description="whether its labels are used, by the names of its classes, all of which data.path must have; absent: where "
        "both have the same classes",
    )


class DataConfig(Section):
    """Which images, and how they reach a worker."""

    path: str = Field(
        "digits",
        min_length=1,
        description="`digits`, `synthetic`, a packed set, a folder with train/CLASS/* and val/CLASS/*, or another layout",
    )
    labels: bool = Field(
        True, description="false: images without labels, from a folder of any depth or any other source, whose labels are ignored"
    )
    more: tuple[MoreDataConfig, ...] = Field(
        (), description="further sets in each training batch; an epoch is one pass over data.path, and these begin again"
    )
    val_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="share of the images that is held out for validation, by a hash of their paths, where a source has no "
        "validation split; absent: 0.1 without labels, and none with labels",
    )
    global_batch_size: Count = Field(128, description="samples per optimizer step over all workers")
    loader_workers: Natural | Literal["auto"] = Field(
        "auto", description="decode threads that feed one worker; auto: as many as are needed; 0 decodes in the training thread"
    )
    loader: Literal["auto", "threads", "process"] = Field(
        "auto",
        description="where they live: threads of the training process, or a process of its own, which does not share its GIL; "
        "auto: a process where a GPU trains",
    )
    image_size: ImageSize = Field(
        8,
        description="height and width of the crops, which the student sees as they are, in pixels; absent for image files: what "
        "the student's library made it for",
    )
    augment: Literal["none", "crop_flip", "pad_crop_flip"] = Field(
        "none", description="crop_flip: RandomResizedCrop + flip; pad_crop_flip: pad by 4, crop, flip, as for CIFAR"
    )
    min_crop_area: Annotated[float, Field(gt=0, le=1)] = Field(
        0.08, description="crop_flip: the smallest part of an image's area that a crop shows"
    )
    device_augment: DeviceAugmentConfig = Field(DeviceAugmentConfig(), description="further augmentation, on the device")
    decoder: Literal["auto", "gpu", "dali"] = Field(
        "auto",
        description="what decodes JPEG; auto: the CPU, by libjpeg-turbo 3 where it is installed, else PIL; gpu, dali: the GPU, "
        "for crop_flip alone",
    )
    fidelity: Literal["fast", "exact"] = Field(
        "fast", description="crop_flip in training: torchvision's pixels within a rounding (exact), or nearly so (fast)"
    )
    val_resize: Count | None = Field(None, description="shorter side before the center crop; absent: image_size·256/224")
    shuffle: str = Field(
        "full", description="training order: `full`; `none`: as stored; `window(n)`: shards at random, shuffled within n samples"
    )
    last_batch: Literal["drop", "short"] = Field("drop", description="what becomes of the last, incomplete training batch")
    prefetch_batches: Count = Field(2, description="batches that a loader prepares ahead")
    max_bad: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.001, description="share of a split's images that an epoch may skip as unreadable; one may always be, unless this is 0"
    )
    stage: Annotated[str, Field(pattern=r"^(none|ram|[/~].*)$")] = Field(
        "none", description="where a node keeps its copy of a packed set: `ram`, or a folder (absolute); `none`: no copy"
    )
    cache: Literal["none", "memory"] = Field("none", description="memory: a node keeps image files that it has read in memory")
    cache_mib: Count | None = Field(
        None, description="most that a node stores with `cache: memory` or of a remote set, in all; absent: by what is free"
    )
    mean: Mean = Field((0.485, 0.456, 0.406), description="per-channel mean of pixels in [0, 1], for the student")
    std: Std = Field((0.229, 0.224, 0.225), description="per-channel deviation of pixels in [0, 1], for the student")
    synthetic_images: Count = Field(2048, description="training images of the `synthetic` source")
    synthetic_classes: Count = Field(10, description="classes of the `synthetic` source")

    @property
    def sets(self) -> tuple[DataConfig, ...]:
        """`path`'s training images and those of `more`, each as if they were alone; nothing of the latter is held out."""
        alone = self.model_copy(update={"more": ()})
        return alone, *(
            alone.model_copy(update={"path": each.path, "labels": self.labels and each.labels is not False, "val_share": 0.0})
            for each in self.more
        )

    @property
    def batch_parts(self) -> tuple[int, ...]:
        """The samples that each of `sets` has in a global batch: at least 1, what is left over by the largest remainders."""
        shares = [each.share for each in self.more]
        quotas = [self.global_batch_size * share for share in (1 - sum(shares), *shares)]
        parts = [max(1, int(quota)) for quota in quotas]
        while (left := self.global_batch_size - sum(parts)) > 0:
            remainders = [quota - part for quota, part in zip(quotas, parts, strict=True)]
            parts[remainders.index(max(remainders))] += 1
        for _ in range(-left):
            parts[parts.index(max(parts))] -= 1
        return tuple(parts)

    @property
    def mixes_unlabeled(self) -> bool:
        """Whether some images may have no label among others that have one."""
        return self.labels and not all(each.labels for each in self.more)

    @property
    def augments_at_random(self) -> bool:
        """Whether an image of the training split is augmented differently in each epoch."""
        return self.augment != "none" or self.device_augment != DeviceAugmentConfig()

    @property
    def decodes_on_device(self) -> bool:
        """Whether training's crops are decoded on the device."""
        return self.decoder in ON_DEVICE

    @field_validator("shuffle")
    @classmethod
    def _check_shuffle(cls, shuffle: str) -> str:
        if shuffle not in ("full", "none") and shuffle_window(shuffle) is None:
            raise ValueError(f"must be full, none or window(n) with a number of samples n, as window(10000), not {shuffle!r}")
        return shuffle


def shuffle_window(shuffle: str) -> int | None:
    """The number of samples n of `data.shuffle: window(n)`; None of the other orders."""
    found = re.fullmatch(r"window\(([1-9][0-9]{0,11})\)", shuffle)
    return int(found[1]) if found else None
