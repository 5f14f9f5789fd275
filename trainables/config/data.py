"""Configuration of the data: which images, how they are augmented, and how they reach a worker."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from trainables.config.section import Count, ImageSize, Mean, Natural, NonNegative, Probability, Section, Std


class PolicyConfig(Section):
    """A policy that draws random operations for each image: torchvision's, or timm's where the name says so."""

    name: Literal["randaugment", "randaugment_timm", "autoaugment", "trivialaugment", "augmix", "three_augment"] = Field(
        description="autoaugment: ImageNet's; randaugment_timm: timm's rand-…-inc1; three_augment: gray, solarize or blur"
    )
    num_ops: Annotated[Count, Field(le=16)] = Field(2, description="randaugment: operations per image")
    magnitude: Annotated[Natural, Field(le=30)] = Field(
        9, description="randaugment: strength of operations, 0 to 30; timm's: 0 to 10"
    )
    magnitude_std: NonNegative = Field(0.0, description="randaugment: std of Gaussian noise on the magnitude, timm's mstd")
    severity: Annotated[Count, Field(le=10)] = Field(3, description="augmix: highest of ten magnitude levels to draw from")


class ColorJitterConfig(Section):
    """How far colors may change."""

    brightness: NonNegative = Field(0.0, description="factor of 1 ± value at most")
    contrast: NonNegative = Field(0.0, description="factor of 1 ± value at most")
    saturation: NonNegative = Field(0.0, description="factor of 1 ± value at most")
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.0, description="shift by up to this fraction of the color circle")
    probability: Probability = Field(1.0, description="probability that an image is changed")


class DeviceAugmentConfig(Section):
    """Training augmentation of whole batches on the device, in this order; an absent or zero value is off."""

    policy: PolicyConfig | None = None
    color_jitter: ColorJitterConfig | None = None
    grayscale: Probability = Field(0.0, description="probability of a gray image")
    random_erasing: Probability = Field(0.0, description="probability that a rectangle becomes the mean color")
    mixup: NonNegative = Field(0.0, description="α of Beta(α, α), from which the mixing weights are drawn")
    cutmix: NonNegative = Field(0.0, description="α of CutMix; if mixup is set too, each image gets one of the two at random")

    @property
    def mixes(self) -> bool:
        """Whether images of different classes may be mixed."""
        return self.mixup > 0 or self.cutmix > 0


class MoreDataConfig(Section):
    """An additional set of training images."""

    path: str = Field(min_length=1, description="as data.path; only its training images are used")
    share: Annotated[float, Field(gt=0, lt=1)] = Field(description="share of each global batch; the rest comes from data.path")
    labels: bool | None = Field(
        None,
        description="use its labels, by class name; data.path must have all its classes; absent: if both have the same",
    )


class DataConfig(Section):
    """Which images to use, and how they reach a worker."""

    path: str = Field(
        "digits",
        min_length=1,
        description="`digits`, `synthetic`, a packed set, a folder with train/CLASS/* and val/CLASS/*, or another layout",
    )
    labels: bool = Field(True, description="false: there are none, or they are ignored")
    more: tuple[MoreDataConfig, ...] = Field(
        (), description="more sets, mixed into each training batch; an epoch is one pass over data.path"
    )
    val_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="share of the images to hold out if there is no validation split; absent: 0.1 without labels, else none; 1: "
        "all, for `distill evaluate`",
    )
    global_batch_size: Count = Field(128, description="samples per optimizer step over all workers")
    loader_workers: Natural | Literal["auto"] = Field(
        "auto", description="decode threads per worker; auto: the cores that training leaves free; 0: the training thread decodes"
    )
    loader: Literal["auto", "threads", "process"] = Field(
        "auto",
        description="decode in threads of the training process or in a separate process; auto: a process on a GPU",
    )
    image_size: ImageSize = Field(
        8,
        description="height and width of crops in pixels; absent for image files: the size the student was designed for",
    )
    augment: Literal["none", "crop_flip", "pad_crop_flip"] = Field(
        "none", description="crop_flip: RandomResizedCrop + flip; pad_crop_flip: pad by 4, crop, flip, as for CIFAR"
    )
    min_crop_area: Annotated[float, Field(gt=0, le=1)] = Field(
        0.08, description="crop_flip: smallest share of an image's area in a crop"
    )
    repeats: Annotated[Count, Field(le=64)] = Field(
        1, description="differently augmented views of an image per batch; an epoch has as many steps but fewer images"
    )
    device_augment: DeviceAugmentConfig = Field(DeviceAugmentConfig(), description="additional augmentation on the device")
    decoder: Literal["auto", "gpu"] = Field(
        "auto",
        description="auto: on the CPU with libjpeg-turbo 3 if installed, else PIL; gpu: JPEGs on the GPU, only with crop_flip",
    )
    fidelity: Literal["fast", "exact"] = Field(
        "fast", description="crop_flip in training: torchvision's pixels up to rounding (exact), or nearly the same (fast)"
    )
    val_resize: Count | None = Field(None, description="shorter side before the center crop; absent: image_size·256/224")
    shuffle: str = Field(
        "full",
        description="training order: `full`; `none`: as stored; `window(n)`: random shards, shuffled within n samples",
    )
    last_batch: Literal["drop", "short"] = Field("drop", description="drop the last, incomplete training batch, or train on it")
    prefetch_batches: Count = Field(2, description="batches that the loader prepares ahead")
    max_bad: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.001,
        description="share of a split's images that an epoch may skip as unreadable, and at least one; 0: none",
    )
    stage: Annotated[str, Field(pattern=r"^(none|ram|[/~].*)$")] = Field(
        "none", description="where each node copies a packed set: `ram` or an absolute folder; `none`: no copy"
    )
    cache_mib: Count | None = Field(None, description="limit of each node's cache of remote sets; absent: by free space")
    mean: Mean = Field((0.485, 0.456, 0.406), description="per-channel mean of the student's pixels in [0, 1]")
    std: Std = Field((0.229, 0.224, 0.225), description="per-channel std of the student's pixels in [0, 1]")
    synthetic_images: Count = Field(2048, description="training images of the `synthetic` source")
    synthetic_classes: Count = Field(10, description="classes of the `synthetic` source")

    @property
    def sets(self) -> tuple[DataConfig, ...]:
        """A configuration for `path` and for each entry of `more`, each on its own; entries of `more` hold nothing out."""
        alone = self.model_copy(update={"more": ()})
        return alone, *(
            alone.model_copy(update={"path": each.path, "labels": self.labels and each.labels is not False, "val_share": 0.0})
            for each in self.more
        )

    @property
    def batch_parts(self) -> tuple[int, ...]:
        """Samples of each of `sets` in a global batch: at least 1 each, rounded by the largest-remainder method."""
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
        """Whether labeled and unlabeled images may be mixed."""
        return self.labels and not all(each.labels for each in self.more)

    @property
    def augments_at_random(self) -> bool:
        """Whether a training image is augmented differently in each epoch."""
        return self.augment != "none" or self.device_augment != DeviceAugmentConfig()

    @property
    def decodes_on_device(self) -> bool:
        """Whether training crops are decoded on the device."""
        return self.decoder == "gpu"

    @field_validator("shuffle")
    @classmethod
    def _check_shuffle(cls, shuffle: str) -> str:
        if shuffle not in ("full", "none") and shuffle_window(shuffle) is None:
            raise ValueError(f"must be full, none or window(n) with n samples, such as window(10000), not {shuffle!r}")
        return shuffle


def shuffle_window(shuffle: str) -> int | None:
    """Return the number of samples n of `data.shuffle: window(n)`; None for the other orders."""
    found = re.fullmatch(r"window\(([1-9][0-9]{0,11})\)", shuffle)
    return int(found[1]) if found else None
