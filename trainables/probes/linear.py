"""A linear probe: multinomial logistic regression on frozen features.

Shapes: N images, B of them at a time, D features, K classes. Weights are (D + 1, K), the last row the bias.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.data.order import mix64
from trainables.distributed.group import Group
from trainables.errors import DataError
from trainables.probes.features import Features

L2 = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
"""Penalties to try, each starting from the previous solution."""
HOLD_OUT = 10
"""One in this many training images is held out to choose the penalty."""
_MAX_NUMBERS = 2**24
"""Maximum number of float64 features or logits in memory at a time: 128 MiB."""


@torch.no_grad()
def linear_probe(train: Features, val: Features, group: Group, *, beat: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Return top-1 and top-5 accuracy in percent, and `l2`, the penalty.

    Features are standardized by the training images. The penalty from `L2` is the one whose fit on nine tenths of the training
    images classifies the rest best; a hash of the index selects these. The final fit is on all training images. Each rank does
    all of the work, so that any number of ranks gives the same bits. `beat` is called for each part of a pass over the images.

    Raises DataError: there are fewer than `HOLD_OUT` training images.
    """
    num_images, device = len(train.labels_N), group.device
    if num_images < HOLD_OUT:
        raise DataError(f"{num_images} training images are too few for a linear probe: use {HOLD_OUT} or more, or k-NN")
    num_classes = int(torch.cat([train.labels_N, val.labels_N]).max()) + 1
    whole = standardized(train.features_ND.to(device), train.labels_N.to(device), num_classes, beat)
    by_hash_N = torch.from_numpy(mix64(train.indices_N.numpy().astype(np.uint64)).argsort()).to(device)
    held_out, others = whole.select(by_hash_N[: num_images // HOLD_OUT]), whole.select(by_hash_N[num_images // HOLD_OUT :])
    tried = list[tuple[float, float, Tensor]]()
    for l2 in L2:
        weights = fit(others, l2, start=tried[-1][2] if tried else None)
        tried.append((accuracy(held_out, weights)["top1_pct"], l2, weights))
    _, l2, weights = max(tried, key=lambda each: each[0])  # ties: the first, with the strongest penalty
    weights = fit(whole, l2, start=weights)
    measured = replace(whole, features_ND=val.features_ND.to(device), labels_N=val.labels_N.to(device))
    return {**accuracy(measured, weights), "l2": l2}


@dataclass(frozen=True)
class Rows:
    """Images to fit or to evaluate, and the standardization of their features."""

    features_ND: Tensor
    labels_N: Tensor
    num_classes: int
    mean_D: Tensor
    std_D: Tensor
    beat: Callable[[], None]

    def select(self, chosen_N: Tensor) -> "Rows":
        return replace(self, features_ND=self.features_ND[chosen_N], labels_N=self.labels_N[chosen_N])

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield standardized features with a trailing 1 for the bias, (B, D + 1) in float64, and labels (B,)."""
        block = max(1, _MAX_NUMBERS // max(self.features_ND.shape[1], self.num_classes))
        for features_BD, labels_B in zip(self.features_ND.split(block), self.labels_N.split(block), strict=True):
            self.beat()
            yield F.pad((features_BD.double() - self.mean_D) / self.std_D, (0, 1), value=1.0), labels_B


def standardized(features_ND: Tensor, labels_N: Tensor, num_classes: int, beat: Callable[[], None] = lambda: None) -> Rows:
    """Return images whose features have mean 0 and standard deviation 1; constant features become 0."""
    zero_D = torch.zeros(features_ND.shape[1], dtype=torch.float64, device=features_ND.device)
    rows = Rows(features_ND, labels_N, num_classes, zero_D, zero_D + 1, beat)
    mean_D = sum((x[:, :-1].sum(0) for x, _ in rows.batches()), zero_D) / len(labels_N)
    rows = replace(rows, mean_D=mean_D)
    std_D = (sum(((x[:, :-1] ** 2).sum(0) for x, _ in rows.batches()), zero_D) / len(labels_N)).sqrt()
    return replace(rows, std_D=torch.where(std_D > 0, std_D, 1))


def fit(rows: Rows, l2: float, *, start: Tensor | None = None, max_gradient: float = 1e-5, max_iterations: int = 500) -> Tensor:
    """Minimize mean cross-entropy + l2/2·‖weights without the bias‖² by full-batch L-BFGS, and return the weights.

    scikit-learn's `C` is 1 / (l2·N).
    """
    size = (rows.features_ND.shape[1] + 1, rows.num_classes)
    weights = nn.Parameter(rows.mean_D.new_zeros(size) if start is None else start.clone())

    @torch.no_grad()
    def closure() -> Tensor:
        penalized = weights.clone()
        penalized[-1] = 0
        loss, gradient = l2 / 2 * penalized.square().sum(), l2 * penalized
        for x_BD, labels_B in rows.batches():
            log_probs_BK = F.log_softmax(x_BD @ weights, dim=1)
            loss += F.nll_loss(log_probs_BK, labels_B, reduction="sum") / len(rows.labels_N)
            error_BK = log_probs_BK.exp() - F.one_hot(labels_B, rows.num_classes)
            gradient.addmm_(x_BD.T, error_BK, alpha=1 / len(rows.labels_N))
        weights.grad = gradient
        return loss

    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=max_iterations,
        max_eval=2 * max_iterations,
        tolerance_grad=max_gradient,
        tolerance_change=0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)  # type: ignore[arg-type]
    return weights.detach()


def accuracy(rows: Rows, weights: Tensor) -> dict[str, float]:
    """Return top-1 and top-5 accuracy in percent; with fewer than five classes top-5 is 100."""
    hits = rows.mean_D.new_zeros(2)
    for x_BD, labels_B in rows.batches():
        is_hit_B5 = (x_BD @ weights).topk(min(5, rows.num_classes), dim=1).indices == labels_B[:, None]
        hits += torch.stack([is_hit_B5[:, 0].sum(), is_hit_B5.sum()])
    top1, top5 = (100 * hits / max(len(rows.labels_N), 1)).tolist()
    return {"top1_pct": top1, "top5_pct": top5}
