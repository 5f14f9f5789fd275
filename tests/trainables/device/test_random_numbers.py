"""The device's random numbers are drawn as the loader's are, bit for bit, from streams of their own."""

import numpy as np
import pytest
import torch

from trainables.data import augment
from trainables.device.random_numbers import DEVICE_STREAM, Draws

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 1), (2**32 - 1, 2**31)])
def test_numbers_equal_numpys_bit_for_bit(seed: int, epoch: int, device: str) -> None:
    indices_B = np.array([0, 1, 2, 1_281_166, 2**31, 2**40 + 7], dtype=np.int64)
    ours = Draws(seed, epoch, torch.from_numpy(indices_B).to(device)).columns(0, 70)
    assert np.array_equal(ours.cpu().numpy(), augment.uniforms(seed + DEVICE_STREAM, epoch, indices_B, 70))


def test_any_columns_can_be_drawn_without_those_before_them() -> None:
    draws = Draws(3, 5, torch.arange(4))
    assert torch.equal(draws.columns(7, 5), draws.columns(0, 12)[:, 7:])


def test_the_device_draws_other_numbers_than_the_loader_for_every_seed() -> None:
    indices_B = torch.arange(200)
    loaders = {x for seed in (0, 1, 2**32 - 1) for x in augment.uniforms(seed, 4, indices_B.numpy(), 30).flatten().tolist()}
    devices = {float(x) for seed in (0, 1, 2**32 - 1) for x in Draws(seed, 4, indices_B).columns(0, 30).flatten()}
    assert len(loaders) == len(devices) == 3 * 200 * 30
    assert not loaders & devices
