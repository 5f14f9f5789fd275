"""Configuration of the processes that train: how many there are, and what each reserves."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from trainables.config.section import Count, Natural, NonNegative, Section


class ScaleConfig(Section):
    """How many processes train, which part of the model each has, and what each reserves."""

    num_workers: Count = Field(1, description="Ray Train workers (world size); [2, 8] sets min_workers to 2 and this to 8")
    min_workers: Count | None = Field(None, description="elastic: continue with as few as this many workers if nodes are lost")
    pipeline_stages: Count = Field(1, description="workers that share one replica of the model, each with some of its layers")
    micro_batches: Count | None = Field(
        None,
        description="parts of a replica's batch; absent: 4 × pipeline_stages, at most one per sample",
    )
    schedule: Literal["1f1b", "gpipe"] = Field(
        "1f1b", description="order of the passes in a pipeline stage; 1f1b stores fewer activations"
    )
    cut: tuple[str, ...] | None = Field(
        None,
        description="modules at which the student's second and later pipeline stages begin; absent: found by timing",
    )
    use_gpu: bool | Literal["auto"] = Field("auto", description="one GPU per worker; auto: if the cluster has GPUs")
    cpus_per_worker: Count = Field(1, description="compute threads of one worker, not counting its loader workers")
    sync_batch_norm: bool = Field(False, description="compute batch norm statistics over all workers")
    hang_after_s: NonNegative | Literal["auto"] = Field(
        "auto",
        description="restart the workers after so many seconds without progress (10 times as many at the start and while "
        "compiling, 5 times in a checkpoint); auto: 30 times the step time, at least 120; 0: never",
    )
    collective_timeout_s: Count = Field(
        1800,
        description="seconds after which torch aborts a collective without naming the late rank; keep it above what "
        "hang_after_s allows for the first step",
    )

    max_failures: Natural = Field(
        3, description="restarts after a worker or node died or hung; announced preemptions do not count"
    )
    wait_for_nodes_s: NonNegative = Field(
        1800.0,
        description="seconds to wait for nodes if there are too few; 0: end at once",
    )

    @model_validator(mode="before")
    @classmethod
    def _parse_range(cls, tree: Any) -> Any:
        workers = tree.get("num_workers") if isinstance(tree, dict) else None
        if not isinstance(workers, list | tuple) or len(workers) != 2:
            return tree
        return {**tree, "min_workers": workers[0], "num_workers": workers[1]}

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model, each of which trains on its part of the global batch."""
        return self.num_workers // self.pipeline_stages
