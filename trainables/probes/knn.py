"""k-NN classification on frozen features, with the protocol of DINO (Caron et al. 2021, https://arxiv.org/abs/2104.14294).

Shapes: N training images, M validation images, Q of them at a time, D features, K neighbors.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainables.distributed.group import Group, all_reduce_sum
from trainables.probes.features import Features

_MAX_SIMILARITIES = 2**25
"""Maximum number of similarities, or pairs of neighbors, in memory at a time: 128 MiB of float32."""


@torch.no_grad()
def knn(
    train: Features,
    val: Features,
    group: Group,
    *,
    num_neighbors: int = 20,
    temperature: float = 0.07,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return top-1 and top-5 accuracy in percent of a weighted vote. Every rank must call this with the same features.

    The nearest training images by cosine similarity vote for their class with exp(similarity / temperature). Earlier images win
    ties of similarity, and earlier classes win ties of votes. The ranks share the work in blocks that depend only on N, so that
    any number of ranks gives the same result. `beat` is called for each block.
    """
    train_ND = F.normalize(train.features_ND.to(group.device), dim=1)
    labels_N = train.labels_N.to(group.device)
    num_neighbors = min(num_neighbors, len(labels_N))
    block = max(1, _MAX_SIMILARITIES // max(len(labels_N), num_neighbors**2))
    hits = torch.zeros(2, dtype=torch.float64, device=group.device)
    for begin in range(group.rank * block, len(val.labels_N), group.world_size * block):
        beat()
        rows = slice(begin, begin + block)
        val_QD = F.normalize(val.features_ND[rows].to(group.device), dim=1)
        nearest_QK, similarities_QK = _nearest(val_QD @ train_ND.T, num_neighbors)
        weights_QK = (similarities_QK.double() / temperature).exp()
        rank_Q = _label_rank(labels_N[nearest_QK], weights_QK, val.labels_N[rows].to(group.device))
        hits += torch.stack([(rank_Q < 1).sum(), (rank_Q < 5).sum()])
    top1, top5 = (100 * all_reduce_sum(hits, group) / max(len(val.labels_N), 1)).tolist()
    return {"top1_pct": top1, "top5_pct": top5, "num_neighbors": float(num_neighbors)}


def _nearest(similarities_QN: Tensor, num_neighbors: int) -> tuple[Tensor, Tensor]:
    """Return the indices (Q, K) of the largest similarities, ascending, and their values; the first ones win ties."""
    values, nearest = similarities_QN.topk(min(num_neighbors + 1, similarities_QN.shape[1]), dim=1)
    if values.shape[1] > num_neighbors:
        is_tied_Q = values[:, -1] == values[:, -2]  # topk may choose any of these
        nearest = nearest[:, :num_neighbors]
        if is_tied_Q.any():
            nearest[is_tied_Q] = similarities_QN[is_tied_Q].argsort(dim=1, descending=True, stable=True)[:, :num_neighbors]
    nearest_QK = nearest.sort(dim=1).values
    return nearest_QK, similarities_QN.gather(1, nearest_QK)


def _label_rank(labels_QK: Tensor, weights_QK: Tensor, labels_Q: Tensor) -> Tensor:
    """Rank each label's class (Q,), from 0, among all classes by the sum of their neighbors' weights, then by class number."""
    same_QKK = labels_QK[:, :, None] == labels_QK[:, None, :]
    votes_QK = (same_QKK * weights_QK[:, None, :]).sum(2)  # per neighbor, the votes of its class
    is_first_QK = ~same_QKK.tril(-1).any(2)  # first of its class, so that each counts once
    is_label_QK, labels_Q1 = labels_QK == labels_Q[:, None], labels_Q[:, None]
    vote_Q1 = torch.where(is_label_QK, votes_QK, 0).amax(1, keepdim=True)
    is_before_QK = (votes_QK > vote_Q1) | ((votes_QK == vote_Q1) & (labels_QK < labels_Q1))
    # A label without votes ranks after all classes with votes, and after those without votes that have a lower number.
    num_voteless_Q = labels_Q - (is_first_QK & (labels_QK < labels_Q1)).sum(1)
    return (is_first_QK & is_before_QK & ~is_label_QK).sum(1) + torch.where(is_label_QK.any(1), 0, num_voteless_Q)
