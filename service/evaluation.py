"""`distill evaluate`: exact accuracy of a checkpoint, on as many workers as asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from service import cluster as clusters
from service.experiment import put
from service.progress import Display
from service.run import absolute
from trainables.config import EvaluateConfig
from trainables.errors import CheckpointError, ClusterError, DistillError, ExperimentError
from trainables.rundir import RunDir


def resolve(checkpoint: Path, data_path: str, overrides: list[str]) -> EvaluateConfig:
    """The evaluation of `checkpoint` as it was trained, on other data; `--set` changes data.*, scale.* and precision.

    Raises:
        CheckpointError: no such checkpoint, or a damaged one.
        ExperimentError: an override that does not fit.
    """
    from pydantic import ValidationError

    from trainables.checkpoint import read

    _, about = read(checkpoint)
    tree: dict[str, Any] = {
        "checkpoint": str(checkpoint.absolute()),
        "output": "unset",
        "data": {"path": absolute(data_path), "global_batch_size": 256}
        | {name: about[name] for name in ("image_size", "val_resize", "mean", "std") if about.get(name) is not None},
    }
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not value:
            raise ExperimentError(f"--set {text}: write --set key=value, such as --set scale.num_workers=2")
        put(tree, key, yaml.safe_load(value), f"--set {text}")
    try:
        return EvaluateConfig.model_validate(tree)
    except ValidationError as error:
        detail = error.errors()[0]
        raise ExperimentError(f"--set {'.'.join(map(str, detail['loc']))}: {detail['msg']}") from error


def evaluate(checkpoint: Path, data_path: str, overrides: list[str], root: Path) -> dict[str, float]:
    """Top-1, top-5, loss and the number of images.

    Raises:
        DistillError: one line.
    """
    config = resolve(checkpoint, data_path, overrides)
    from trainables.data.source import open_source

    open_source(config.data, "val")  # refuse what cannot be read before Ray starts
    capacity = clusters.local_capacity()
    workers = config.data.loader_workers
    cpus = config.scale.cpus_per_worker + (workers if isinstance(workers, int) else 1)
    storage = RunDir(root.absolute() / ".evaluate")
    storage.root.mkdir(parents=True, exist_ok=True)
    if clusters.is_local() and (refusal := capacity.refusal(clusters.Need(config.scale.num_workers, cpus))):
        raise ClusterError(f"{refusal}: lower scale.num_workers")
    with Display() as display, clusters.connect(config.scale.num_workers * cpus, storage.root) as cluster:
        from trainables import worker

        if workers == "auto":
            workers = clusters.auto_loader_workers(cluster, config.scale.num_workers, config.scale.cpus_per_worker)
        gpu = clusters.use_gpu(config.scale.use_gpu, cluster)
        need = clusters.Need(config.scale.num_workers, config.scale.cpus_per_worker + workers, int(gpu))
        if refusal := cluster.refusal(need):
            raise ClusterError(f"{refusal}: lower scale.num_workers or data.loader_workers")
        display.say(f"evaluating {checkpoint} on {config.data.path} with {config.scale.num_workers} workers")
        output = storage.root / f"{checkpoint.stem}-{id(config):x}.json"
        data = config.data.model_copy(update={"loader_workers": workers})
        try:
            worker.fit(
                config.model_copy(update={"data": data, "output": str(output)}),
                use_gpu=gpu, loader_workers=workers, storage=storage.tune, name=output.stem,
            )  # fmt: skip
            return dict(json.loads(output.read_text()))
        except DistillError:
            raise
        except Exception as error:  # whatever Ray wraps a worker's error in
            raise CheckpointError(f"evaluation failed: {cause(error)}") from error
        finally:
            output.unlink(missing_ok=True)


def cause(error: Exception) -> str:
    """The last line of a worker's own exception inside Ray's."""
    failures = getattr(error, "worker_failures", {})
    text = str(next(iter(failures.values()), error)).strip()
    return text.splitlines()[-1] if text else type(error).__name__
