"""How a student without a classifier is measured while it is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainables.config.data import DataConfig
from trainables.config.section import Count, Section


class EvalConfig(Section):
    """What the features of a student without a classifier are worth, at each evaluation."""

    path: str | None = Field(
        None,
        min_length=1,
        description="images with labels, as data.path, for a k-NN classifier on the student's features",
    )
    best: Literal["top1_pct", "cka", "cosine", "loss"] | None = Field(
        None, description="number by which a checkpoint is the best; absent: top1_pct if path is set, else cka"
    )
    num_neighbors: Count = Field(20, description="k of k-NN")

    def labeled(self, data: DataConfig) -> DataConfig | None:
        """How the images of `path` are read: prepared as those of `data`. None: there are none."""
        own = {"path": self.path, "labels": True, "more": (), "val_share": None, "stage": "none", "cache": "none"}
        return data.model_copy(update=own) if self.path is not None else None
