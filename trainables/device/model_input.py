"""How a batch of uint8 images becomes a model's input, and in which precision the model runs."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from trainables.config import TrainConfig

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A factory of the autocast context of `precision`; none for fp32 and fp64."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, AUTOCAST[precision])


def normalizer(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype, layout: torch.memory_format
) -> Callable[[Tensor], Tensor]:
    """A function from images_BCHW on `device` with values 0 … 255 to (x/255 − mean)/std, one multiply and one add."""
    mean_C11 = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
    std_C11 = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
    scale = (1 / (255 * std_C11)).to(device, dtype)
    shift = (-mean_C11 / std_C11).to(device, dtype)
    return lambda images: torch.addcmul(shift, images.to(dtype, memory_format=layout), scale)


def image_normalizer(config: TrainConfig, device: torch.device) -> Callable[[Tensor], Tensor]:
    """From uint8 images_BCHW on the device to the models' input, for evaluation; see `build_train_inputs` for training."""
    return normalizer(config.data.mean, config.data.std, device, *tensor_format(config))


def tensor_format(config: TrainConfig) -> tuple[torch.dtype, torch.memory_format]:
    """The dtype of the models' parameters, and the memory format of parameters and images; see `with_precision` for `auto`."""
    layout = torch.channels_last if config.train.channels_last is True else torch.contiguous_format
    return torch.float64 if config.precision == "fp64" else torch.float32, layout
