"""Configuration of evaluations during training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainables.config.data import DataConfig
from trainables.config.section import Count, Section


class EvalConfig(Section):
    """When the student is evaluated, and how one without a classifier is scored."""

    asynchronous: bool = Field(
        False,
        description="evaluate while the next epoch trains, on one more worker if the cluster has room",
    )
    path: str | None = Field(
        None,
        min_length=1,
        description="labeled images, as data.path, for a k-NN classifier on the student's features",
    )
    best: Literal["top1_pct", "cka", "cosine", "loss"] | None = Field(
        None, description="metric that selects the best checkpoint; absent: top1_pct if path is set, else cka"
    )
    num_neighbors: Count = Field(20, description="k of k-NN")

    def labeled(self, data: DataConfig) -> DataConfig | None:
        """Return `data` with its source replaced by `path`; None without a `path`."""
        own = {"path": self.path, "labels": True, "more": (), "val_share": None, "stage": "none"}
        return data.model_copy(update=own) if self.path is not None else None
