"""k-NN is the vote of a plain loop, for any number of ranks and whatever fits into memory at a time."""

import numpy as np
import pytest
import torch

from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.probes import knn as module
from trainables.probes.features import Features
from trainables.probes.knn import knn


def clusters(seed: int, num_images: int, *, num_classes: int = 12, spread: float = 1.2) -> Features:
    """Features (N, 16) around a center for each class, in float64."""
    generator = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(num_classes, 16))
    labels_N = generator.integers(num_classes, size=num_images)
    features_ND = centers[labels_N] + spread * generator.normal(size=(num_images, 16))
    return Features(torch.from_numpy(features_ND), torch.from_numpy(labels_N), torch.arange(num_images))


def plain_loop(train: Features, val: Features, num_neighbors: int) -> tuple[float, float]:
    """Top-1 and top-5 in percent: one image, one neighbor at a time."""
    right = right_five = 0
    for query, label in zip(val.features_ND.numpy(), val.labels_N.tolist(), strict=True):
        cosines = [float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)) for row in train.features_ND.numpy()]
        nearest = sorted(range(len(cosines)), key=lambda index: (-cosines[index], index))[:num_neighbors]
        votes = dict.fromkeys(range(12), 0.0)
        for index in nearest:
            votes[int(train.labels_N[index])] += np.exp(cosines[index] / 0.07)
        order = sorted(votes, key=lambda number: (-votes[number], number))
        right, right_five = right + (label == order[0]), right_five + (label in order[:5])
    return 100 * right / len(val.labels_N), 100 * right_five / len(val.labels_N)


@pytest.mark.parametrize("num_neighbors", [20, 3, 500])
def test_it_is_the_vote_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch, num_neighbors: int) -> None:
    train, val = clusters(0, 200), clusters(1, 90)
    expected = plain_loop(train, val, num_neighbors)
    assert 20 < expected[0] < expected[1] < 100
    for at_once in (2**25, 200 * 7, 1):
        monkeypatch.setattr(module, "_MAX_NUMBERS", at_once)
        found = knn(train, val, Group(), num_neighbors=num_neighbors)
        assert (found["top1_pct"], found["top5_pct"]) == pytest.approx(expected, rel=1e-12)


def test_of_equally_near_images_the_first_ones_vote() -> None:
    one_image = torch.ones(40, 3)
    labels_N = torch.tensor([7] * 20 + [1] * 20)
    train = Features(one_image, labels_N, torch.arange(40))
    val = Features(one_image[:2], torch.tensor([7, 1]), torch.arange(2))
    found = knn(train, val, Group())
    assert (found["top1_pct"], found["num_neighbors"]) == (50.0, 20.0)
    assert knn(train._replace(labels_N=labels_N.flip(0)), val, Group())["top1_pct"] == 50.0


def measured(group: Group) -> dict[str, float]:
    module._MAX_NUMBERS = 200 * 7
    return knn(clusters(0, 200), clusters(1, 90), group)


def test_ranks_share_the_work_and_get_one_ranks_result(ranks: RankPool) -> None:
    (alone,) = ranks.run(1, measured)
    assert ranks.run(3, measured) == [alone] * 3
