"""Standardized features: Hadamard matrices, the formulas beside plain numpy, the inverse, and any number of workers."""

import numpy as np
import pytest
import torch
from torch import Tensor

from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.methods.standardize_features import FeatureStandardizer, Kind, eigenvectors, hadamard
from trainables.notices import notices_to


def features(count: int, width: int, seed: int = 0) -> Tensor:
    """Correlated, with a mean and with channels of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    x_ND = torch.randn(count, width, dtype=torch.float64, generator=generator) @ mixing
    return x_ND * torch.logspace(-2, 1, width, dtype=torch.float64) + 3


def standardizer(kind: Kind, x_ND: Tensor) -> FeatureStandardizer:
    built = FeatureStandardizer(kind, x_ND.shape[1], seed=0, where="here").double()
    for part in x_ND.split(7):
        built.add(part)
    built.finish(Group())
    return built


@pytest.mark.parametrize("width", [1, 2, 4, 12, 20, 28, 36, 384, 768, 1024, 1152, 1280, 1536])
def test_hadamard_matrices_are_orthogonal_and_all_their_entries_have_one_size(width: int) -> None:
    matrix = hadamard(width)
    assert matrix is not None
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, width**-0.5), rtol=1e-12, atol=0)


@pytest.mark.parametrize("width", [3, 6, 52, 770])
def test_other_widths_have_none(width: int) -> None:
    assert hadamard(width) is None


def test_phi_s_is_the_papers() -> None:
    x_ND, matrix = features(50, 12), hadamard(12)
    assert matrix is not None
    built = standardizer("phi_s", x_ND)
    mean_D, covariance_DD = x_ND.numpy().mean(0), np.cov(x_ND.numpy().T, bias=True)
    values_D, vectors_DD = np.linalg.eigh(covariance_DD)
    turned_DD = matrix.numpy().T @ built.weight_DD.numpy() * np.sqrt(values_D.mean())  # Uᵀ, but for the signs of its rows
    np.testing.assert_allclose(np.abs(turned_DD), np.abs(vectors_DD.T), rtol=0, atol=1e-9)
    np.testing.assert_allclose(built.mean_D.numpy(), mean_D, rtol=1e-12)
    y_ND = built(x_ND).numpy()
    np.testing.assert_allclose(y_ND.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(y_ND.var(0), 1, rtol=1e-12)
    before, after = (np.linalg.norm(x[1:] - x[:-1], axis=1) for x in (x_ND.numpy(), y_ND))
    np.testing.assert_allclose(after / before, 1 / np.sqrt(values_D.mean()), rtol=1e-9)


def test_per_channel_divides_each_channel_by_its_own_deviation() -> None:
    x_ND = features(50, 5)
    x_ND[:, 2] = 7.0
    y_ND, x_ND = standardizer("per_channel", x_ND)(x_ND).numpy(), x_ND.numpy()
    moving = [0, 1, 3, 4]
    expected = (x_ND[:, moving] - x_ND[:, moving].mean(0)) / x_ND[:, moving].std(0)
    np.testing.assert_allclose(y_ND[:, moving], expected, rtol=1e-9)
    np.testing.assert_allclose(y_ND[:, 2], 0, atol=1e-12)


def test_features_that_never_change_are_finite() -> None:
    x_ND = torch.full((4, 8), 2.0, dtype=torch.float64)
    assert standardizer("phi_s", x_ND)(x_ND).abs().max() < 1e-12
    assert standardizer("per_channel", x_ND)(x_ND).abs().max() < 1e-12


def test_a_width_without_a_hadamard_matrix_is_a_notice_and_has_a_variance_of_1_on_average() -> None:
    lines: list[str] = []
    with notices_to(lines.append):
        x_ND = features(50, 6)
        y_ND = standardizer("phi_s", x_ND)(x_ND)
    assert lines == [
        "here: no Hadamard matrix with 6 rows can be constructed: a random orthogonal matrix is used instead, so the channels'"
        " variances are only 1 on average"
    ]
    assert float(y_ND.var(0, correction=0).mean()) == pytest.approx(1)


def test_rounding_does_not_change_the_eigenvectors_of_fewer_features_than_channels() -> None:
    x_ND = features(5, 12)
    covariance_DD = x_ND.T.cov(correction=0)
    noise = (
        1e-15 * covariance_DD.abs().max() * torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    )
    torch.testing.assert_close(eigenvectors(covariance_DD + noise + noise.T), eigenvectors(covariance_DD), rtol=0, atol=1e-9)


def on_a_rank(group: Group, sizes: tuple[int, ...]) -> list[Tensor]:
    begin, built = sum(sizes[: group.rank]), FeatureStandardizer("phi_s", 12, seed=0, where="here").double()
    for seed in range(2):
        built.add(features(sum(sizes), 12, seed)[begin : begin + sizes[group.rank]])
    built.finish(group)
    return [built.mean_D, built.weight_DD]


@pytest.mark.parametrize("sizes", [(30, 0, 20), (3, 0, 2)])
def test_workers_compute_what_one_does(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    alone = on_a_rank(Group(), (sum(sizes),))
    for found in ranks.run(len(sizes), on_a_rank, sizes):
        for one, other in zip(alone, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)
