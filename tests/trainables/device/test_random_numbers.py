"""The device's random numbers are drawn as the loader's are, bit for bit, from a stream for each name."""

import itertools

import numpy as np
import pytest
import torch

from trainables.data import augment
from trainables.device.random_numbers import Draws

NAMES = ("randaugment", "color_jitter", "random_erasing", "mixing", "crd")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 1), (2**32 - 1, 2**31)])
def test_numbers_equal_numpys_bit_for_bit(seed: int, epoch: int, device: str) -> None:
    indices_B = np.array([0, 1, 2, 1_281_166, 2**31, 2**40 + 7], dtype=np.int64)
    draws = Draws(seed, epoch, torch.from_numpy(indices_B).to(device))
    for name in ("", *NAMES):
        expected = augment.uniforms(seed, epoch, indices_B, 70, name)
        assert np.array_equal(draws.uniforms(name, 70).cpu().numpy(), expected)
        assert np.array_equal(draws.uniforms(name, 7).cpu().numpy(), expected[:, :7])


def test_no_name_draws_what_another_or_the_loader_draws() -> None:
    drawn = [augment.uniforms(seed, 4, np.arange(200), 30, name) for seed in (0, 1, 2**32 - 1) for name in ("", *NAMES)]
    assert len(np.unique(drawn)) == np.size(drawn)


def test_the_numbers_of_each_name_are_uniform_and_independent_of_those_of_the_others() -> None:
    drawn = {name: augment.uniforms(5, 10, np.arange(20_000), 4, name) for name in ("", *NAMES)}
    for values in drawn.values():  # 99 degrees of freedom: chi-square is 99 ± 14
        counts = np.histogram(values, bins=100, range=(0, 1))[0]
        assert ((counts - 800) ** 2 / 800).sum() < 99 + 5 * 14
    for one, other in itertools.combinations(drawn.values(), 2):  # of 80,000 pairs, below 0.018 by five deviations
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.018
