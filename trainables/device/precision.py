"""What `precision: auto` and `train.channels_last: auto` are on the devices of a job; the precision of float32 products."""

import logging
from typing import TypeVar, cast

import torch

from trainables.config import EvaluateConfig, Precision, TrainConfig
from trainables.distributed.group import Group, gather_objects

log = logging.getLogger("raydistill")

LEAST_IMAGE_SIZE = 224
"""Below, launches bound the steps of the models that such images have: half precision saves the GPU's time, of which there is
enough, and adds launches that cast."""

Config = TypeVar("Config", bound=TrainConfig | EvaluateConfig)


def choose_precision(image_size: int, *, without_bf16: str | None) -> tuple[Precision, str]:
    """What `auto` is, and why: bf16 for large images, where all devices have it; else fp32, of which a GPU makes TF32.

    `without_bf16`: a device of the job without bf16, in words.
    """
    if without_bf16 is not None:
        return "fp32", f"{without_bf16} has no bf16"
    if image_size < LEAST_IMAGE_SIZE:
        return "fp32", f"launches bound the steps on images of {image_size} px, below {LEAST_IMAGE_SIZE}"
    return "bf16", f"images of {image_size} px, on GPUs that have it"


def with_precision(config: Config, group: Group) -> Config:
    """The configuration with the precision and the memory format that `auto` is; the log says which.

    Every rank calls it, and gets the same. Tensor cores compute convolutions of half precision in channels_last, and oneDNN
    those of a CPU: other formats are converted in each of them. A CPU has no such kernels of float64.
    """
    config = _with_precision(config, group)
    if isinstance(config, TrainConfig) and config.train.channels_last == "auto":
        channels_last = config.precision in ("bf16", "fp16") or (config.precision == "fp32" and group.device.type == "cpu")
        train = config.train.model_copy(update={"channels_last": channels_last})
        return cast(Config, config.model_copy(update={"train": train}))
    return config


def _with_precision(config: Config, group: Group) -> Config:
    teachers = (*config.all_teachers, config.finetuned) if isinstance(config, TrainConfig) else ()
    if "auto" not in (config.precision, *(each.precision for each in teachers if each is not None)):
        return config
    without_bf16 = next(filter(None, gather_objects(name_without_bf16(group.device), group)), None)
    precision, reason = choose_precision(config.data.image_size, without_bf16=without_bf16)
    if group.is_main:
        stage = config.stage if isinstance(config, TrainConfig) else "evaluation"
        log.info("%s: precision auto: %s: %s", stage, precision, reason)
    own = {"precision": precision}
    update: dict[str, object] = own | {"precision_reason": reason} if config.precision == "auto" else {}
    if isinstance(config, TrainConfig):
        teacher, finetuned, *several = (
            each.model_copy(update=own) if each is not None and each.precision == "auto" else each
            for each in (config.teacher, config.finetuned, *config.teachers)
        )
        update |= {"teacher": teacher, "finetuned": finetuned, "teachers": tuple(several)}
    return cast(Config, config.model_copy(update=update))


def set_matmul_precision() -> None:
    """Products of float32 matrices in full float32, for this process.

    Convolutions are in TF32 by default, of which training takes no harm. Methods subtract products of matrices that are nearly
    equal; a container may have allowed TF32 for these too (`TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`).
    """
    torch.set_float32_matmul_precision("highest")


def name_without_bf16(device: torch.device) -> str | None:
    """A device whose matrix units have no bfloat16, in words: a CPU, a GPU before Ampere. None: it has it."""
    if device.type != "cuda":
        return "a CPU"
    return None if torch.cuda.get_device_capability(device) >= (8, 0) else torch.cuda.get_device_name(device)
