"""The linear probe is scikit-learn's logistic regression, and chooses its penalty on images that it was not fitted to."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from tests.trainables.probes.test_knn import clusters
from trainables.data.order import mix64
from trainables.distributed.group import Group
from trainables.errors import DataError
from trainables.probes import linear as module
from trainables.probes.linear import L2, accuracy, fit, linear_probe, standardized


@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_its_weights_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch, l2: float) -> None:
    monkeypatch.setattr(module, "_MAX_NUMBERS", 16 * 100)  # several blocks
    train, val, scale_D = clusters(0, 250), clusters(1, 90), torch.logspace(-3, 3, 16)
    train_ND, val_MD = train.features_ND * scale_D + 5, val.features_ND * scale_D + 5
    rows = standardized(train_ND, train.labels_N, 12)
    weights = fit(rows, l2, max_gradient=1e-10)
    scaler = StandardScaler().fit(train_ND.numpy())
    reference = LogisticRegression(C=1 / (l2 * 250), tol=1e-10, max_iter=10_000)
    reference.fit(scaler.transform(train_ND.numpy()), train.labels_N.numpy())
    assert weights[:-1].T.numpy() == pytest.approx(reference.coef_, abs=1e-5)
    bias_K = weights[-1] - weights[-1].mean()  # the same number more for all classes is no difference
    assert bias_K.numpy() == pytest.approx(reference.intercept_ - reference.intercept_.mean(), abs=1e-5)
    measured = dataclasses.replace(rows, features_ND=val_MD, labels_N=val.labels_N)
    top1_pct = 100 * reference.score(scaler.transform(val_MD.numpy()), val.labels_N.numpy())
    assert accuracy(measured, weights)["top1_pct"] == pytest.approx(top1_pct)


def test_the_penalty_is_the_best_one_on_a_tenth_of_the_training_images_that_their_indices_choose() -> None:
    train, val = clusters(0, 300, spread=1.5), clusters(1, 100, spread=1.5)
    x_ND, labels_N = StandardScaler().fit_transform(train.features_ND.numpy()), train.labels_N.numpy()
    held_out = np.argsort(mix64(np.arange(300, dtype=np.uint64)))[:30]
    others, scores = np.setdiff1d(np.arange(300), held_out), {}
    for l2 in L2:
        reference = LogisticRegression(C=1 / (l2 * 270), tol=1e-9, max_iter=10_000).fit(x_ND[others], labels_N[others])
        scores[l2] = reference.score(x_ND[held_out], labels_N[held_out])
    found = linear_probe(train, val, Group())
    assert found["l2"] == max(L2, key=lambda l2: scores[l2])
    assert len({*scores.values()}) > 1
    assert found == linear_probe(train, val, Group())
    assert 20 < found["top1_pct"] < found["top5_pct"] < 100


def test_features_that_are_the_same_for_all_images_change_nothing() -> None:
    train, val = clusters(0, 100), clusters(1, 40)
    constant = train._replace(features_ND=torch.nn.functional.pad(train.features_ND, (0, 1), value=3.0))
    same = val._replace(features_ND=torch.nn.functional.pad(val.features_ND, (0, 1), value=3.0))
    assert linear_probe(constant, same, Group()) == linear_probe(train, val, Group())


def test_too_few_images_are_refused() -> None:
    with pytest.raises(DataError, match="9 training images are too few for a linear probe: use 10 or more, or k-NN"):
        linear_probe(clusters(0, 9), clusters(1, 9), Group())
