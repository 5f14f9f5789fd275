"""k-NN classification on frozen features, with the protocol of DINO (Caron et al. 2021, https://arxiv.org/abs/2104.14294).

Shapes: N training images, M validation images, Q of them at a time, D features, K neighbors, C classes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainables.distributed.group import Group, all_reduce_sum
from trainables.probes.features import Features

TEMPERATURE = 0.07
_MAX_NUMBERS = 2**25
"""Maximum number of similarities, or of votes, in memory at a time: 128 MiB of float32."""


@torch.no_grad()
def knn(
    train: Features, val: Features, group: Group, *, num_neighbors: int = 20, beat: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return top-1 and top-5 accuracy in percent of a weighted vote. Every rank must call this with the same features.

    The nearest training images by cosine similarity vote for their class with exp(similarity / TEMPERATURE). Earlier images win
    ties of similarity, and earlier classes win ties of votes. The ranks share the work in blocks that depend only on the data,
    so that any number of ranks gives the same result. `beat` is called for each block.
    """
    train_ND = F.normalize(train.features_ND.to(group.device), dim=1)
    train_labels_N, val_labels_M = train.labels_N.to(group.device), val.labels_N.to(group.device)
    num_neighbors, num_classes = min(num_neighbors, len(train_labels_N)), int(torch.cat([train.labels_N, val.labels_N]).max()) + 1
    classes_C = torch.arange(num_classes, device=group.device)
    block = max(1, _MAX_NUMBERS // max(len(train_labels_N), num_classes))
    hits = torch.zeros(2, dtype=torch.float64, device=group.device)
    for begin in range(group.rank * block, len(val_labels_M), group.world_size * block):
        beat()
        rows = slice(begin, begin + block)
        val_QD, labels_Q1 = F.normalize(val.features_ND[rows].to(group.device), dim=1), val_labels_M[rows, None]
        nearest_QK, similarities_QK = _nearest(val_QD @ train_ND.T, num_neighbors)
        votes_QC = torch.zeros(len(val_QD), num_classes, dtype=torch.float64, device=group.device)
        for nearest_Q1, similarity_Q1 in zip(nearest_QK.split(1, 1), similarities_QK.split(1, 1), strict=True):
            votes_QC.scatter_add_(1, train_labels_N[nearest_Q1], (similarity_Q1.double() / TEMPERATURE).exp())
        own_Q1 = votes_QC.gather(1, labels_Q1)
        rank_Q = ((votes_QC > own_Q1) | ((votes_QC == own_Q1) & (classes_C < labels_Q1))).sum(1)
        hits += torch.stack([(rank_Q < 1).sum(), (rank_Q < 5).sum()])
    top1, top5 = (100 * all_reduce_sum(hits, group) / max(len(val_labels_M), 1)).tolist()
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
