"""How a batch of uint8 images becomes pixels, and in which precision models run on them."""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trainables.config import TrainConfig, WeightedConfig

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A factory of the autocast context of `precision`; none for fp32 and fp64."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, AUTOCAST[precision])


def teacher_precision(teacher: WeightedConfig, config: TrainConfig) -> str:
    """The precision of a teacher's forward passes: its own, else the job's."""
    return teacher.precision or config.precision


def teacher_autocast(
    teacher: WeightedConfig, config: TrainConfig, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A factory of the autocast context of a teacher, also inside of another one that its own `precision` replaces."""
    if teacher.precision is None:
        return autocast(config.precision, device)
    dtype = AUTOCAST.get(teacher.precision)
    return lambda: torch.autocast(device.type, dtype, enabled=dtype is not None)


def to_pixels(images_BCHW: Tensor, dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Pixels in [0, 1] of uint8 images."""
    return images_BCHW.to(dtype, memory_format=layout).div_(255)


def pixels_of(config: TrainConfig) -> Callable[[Tensor], Tensor]:
    """`to_pixels` in the job's tensor format."""
    dtype, layout = tensor_format(config)
    return partial(to_pixels, dtype=dtype, layout=layout)


def tensor_format(config: TrainConfig) -> tuple[torch.dtype, torch.memory_format]:
    """The dtype of the models' parameters, and the memory format of parameters and images; see `with_precision` for `auto`."""
    layout = torch.channels_last if config.train.channels_last is True else torch.contiguous_format
    return torch.float64 if config.precision == "fp64" else torch.float32, layout
