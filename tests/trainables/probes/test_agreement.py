"""CKA is made of sums over images: any batches and any ranks give what all images at once give."""

import numpy as np
import pytest
import torch
from torch import Tensor

from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.probes.agreement import LinearCKA


def features() -> tuple[Tensor, Tensor]:
    """(50, 6) and (50, 9) that are related, far from a mean of 0."""
    torch.manual_seed(1)
    x_ND = torch.randn(50, 6) + 3
    return x_ND, x_ND @ torch.randn(6, 9) + torch.randn(50, 9) - 2


def expected_cka() -> float:
    """By Gram matrices (N, N) of centered features: HSIC(K, M) / √(HSIC(K, K)·HSIC(M, M))."""
    x_ND, y_NE = (each.double().numpy() for each in features())
    center = np.eye(50) - 1 / 50
    k, m = (center @ each @ each.T @ center for each in (x_ND, y_NE))
    return float((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))


def measured(group: Group, batch_size: int) -> float:
    x_ND, y_NE = features()
    cka = LinearCKA(6, 9, group.device)
    for x_BD, y_BE in list(zip(x_ND.split(batch_size), y_NE.split(batch_size), strict=True))[group.rank :: group.world_size]:
        cka.add(x_BD, y_BE)
    assert cka.result(group) == cka.result(group)  # the sums stay
    return cka.result(group)


def test_any_batches_and_ranks_give_what_all_images_at_once_give(ranks: RankPool) -> None:
    expected = pytest.approx(expected_cka(), rel=1e-12)
    assert 0.1 < expected_cka() < 0.99
    for batch_size in (1, 7, 50):
        assert measured(Group(), batch_size) == expected
    for result in ranks.run(3, measured, 7):
        assert result == expected


def test_features_that_differ_by_a_rotation_and_a_scale_are_the_same_to_cka_and_without_images_nothing_is() -> None:
    x_ND, _ = features()
    rotation = torch.linalg.qr(torch.randn(6, 6)).Q
    cka = LinearCKA(6, 6, torch.device("cpu"))
    assert np.isnan(cka.result(Group()))
    cka.add(x_ND, 3 * x_ND @ rotation + 5)
    assert cka.result(Group()) == pytest.approx(1, abs=1e-6)
