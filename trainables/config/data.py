"""Which images, how they are augmented, and how they reach a worker."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from trainables.config.section import Count, ImageSize, Mean, Natural, NonNegative, Probability, Section, Std

ON_DEVICE = ("gpu", "dali")
"""What `data.decoder` may be that decodes on the device, see `trainables.device.decoders`."""


class PolicyConfig(Section):
    """A policy that draws operations for each image, with torchvision's operations or, where it is named, timm's."""

    name: Literal["randaugment", "randaugment_timm", "autoaugment", "trivialaugment", "augmix", "three_augment"] = Field(
        description="autoaugment: ImageNet's; randaugment_timm: timm's rand-…-inc1; three_augment: gray, solarized or blurred"
    )
    num_ops: Annotated[Count, Field(le=16)] = Field(2, description="randaugment: operations on each image")
    magnitude: Annotated[Natural, Field(le=30)] = Field(9, description="randaugment: of each operation, 0 to 30; timm's: 0 to 10")
    magnitude_std: NonNegative = Field(0.0, description="randaugment: deviation of normal noise on the magnitude, timm's mstd")
    severity: Annotated[Count, Field(le=10)] = Field(3, description="augmix: magnitudes are the first so many of ten")


class ColorJitterConfig(Section):
    """How far colors may be changed: factors from 1 - value to 1 + value, hue by a part of the color circle."""

    brightness: NonNegative = Field(0.0, description="factor from 1 - value to 1 + value")
    contrast: NonNegative = Field(0.0, description="factor from 1 - value to 1 + value")
    saturation: NonNegative = Field(0.0, description="factor from 1 - value to 1 + value")
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.0, description="shift by up to this part of the color circle")
    probability: Probability = Field(1.0, description="share of the images that are changed")


class DeviceAugmentConfig(Section):
    """Training augmentation of whole batches on the device, in this order; absent or 0 is off."""

    policy: PolicyConfig | None = None
    color_jitter: ColorJitterConfig | None = None
    grayscale: Probability = Field(0.0, description="probability of a gray image")
    random_erasing: Probability = Field(0.0, description="probability that a rectangle becomes the mean color")
    mixup: NonNegative = Field(0.0, description="α of Beta(α, α), which draws the shares of two mixed images")
    cutmix: NonNegative = Field(0.0, description="α for pasted rectangles; with mixup, each image draws which")

    @property
    def mixes(self) -> bool:
        """Whether an image may be mixed with one of another class."""
        return self.mixup > 0 or self.cutmix > 0


class MoreDataConfig(Section):
    """A further set of training images."""

    path: str = Field(min_length=1, description="as data.path; only its training images are used")
    share: Annotated[float, Field(gt=0, lt=1)] = Field(description="part of each global batch; data.path has the rest")
    labels: bool | None = Field(
        None,
        description="use its labels, by class names, all of which data.path must have; absent: if both have the same classes",
    )


class DataConfig(Section):
    """Which images, and how they reach a worker."""

    path: str = Field(
        "digits",
        min_length=1,
        description="`digits`, `synthetic`, a packed set, a folder with train/CLASS/* and val/CLASS/*, or another layout",
    )
    labels: bool = Field(True, description="false: images without labels; those of a source are ignored")
    more: tuple[MoreDataConfig, ...] = Field(
        (), description="further sets in each training batch; an epoch is one pass over data.path"
    )
    val_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="share of the images held out for validation if a source has no validation split; absent: 0.1 without "
        "labels, none with labels",
    )
    global_batch_size: Count = Field(128, description="samples per optimizer step over all workers")
    loader_workers: Natural | Literal["auto"] = Field(
        "auto", description="decode threads per worker; auto: the cores that training leaves; 0: the training thread decodes"
    )
    loader: Literal["auto", "threads", "process"] = Field(
        "auto",
        description="decode in threads of the training process, or in a process of its own; auto: a process if a GPU trains",
    )
    image_size: ImageSize = Field(
        8,
        description="height and width of the crops in pixels; absent for image files: what the student's library made it for",
    )
    augment: Literal["none", "crop_flip", "pad_crop_flip"] = Field(
        "none", description="crop_flip: RandomResizedCrop + flip; pad_crop_flip: pad by 4, crop, flip, as for CIFAR"
    )
    min_crop_area: Annotated[float, Field(gt=0, le=1)] = Field(
        0.08, description="crop_flip: smallest share of an image's area in a crop"
    )
    repeats: Annotated[Count, Field(le=64)] = Field(
        1, description="views of an image in a training batch, augmented differently; an epoch of as many steps has fewer images"
    )
    device_augment: DeviceAugmentConfig = Field(DeviceAugmentConfig(), description="further augmentation, on the device")
    decoder: Literal["auto", "gpu", "dali"] = Field(
        "auto",
        description="auto: the CPU, by libjpeg-turbo 3 if installed, else PIL; gpu, dali: JPEGs on the GPU, only with crop_flip",
    )
    fidelity: Literal["fast", "exact"] = Field(
        "fast", description="crop_flip in training: torchvision's pixels within rounding (exact), or nearly so (fast)"
    )
    val_resize: Count | None = Field(None, description="shorter side before the center crop; absent: image_size·256/224")
    shuffle: str = Field(
        "full", description="training order: `full`; `none`: as stored; `window(n)`: shards at random, shuffled within n samples"
    )
    last_batch: Literal["drop", "short"] = Field("drop", description="drop the last, incomplete training batch, or train on it")
    prefetch_batches: Count = Field(2, description="batches that a loader prepares ahead")
    max_bad: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.001,
        description="share of a split's images that an epoch may skip as unreadable; one is always allowed, unless this is 0",
    )
    stage: Annotated[str, Field(pattern=r"^(none|ram|[/~].*)$")] = Field(
        "none", description="where a node copies a packed set: `ram` or an absolute folder; `none`: no copy"
    )
    cache_mib: Count | None = Field(None, description="limit of what a node stores of remote sets; absent: by free space")
    mean: Mean = Field((0.485, 0.456, 0.406), description="per-channel mean of the student's pixels in [0, 1]")
    std: Std = Field((0.229, 0.224, 0.225), description="per-channel deviation of the student's pixels in [0, 1]")
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
