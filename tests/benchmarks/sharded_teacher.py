"""Peak memory of a worker whose teacher is sharded over two beside that of one with a whole teacher, in steps of a real job.

The teacher, ViT-L/16 with 304 million parameters, is nearly all of the job. Each side has two new processes over Gloo. A peak is
that of the resident memory while an epoch trains, less what the process had before the job was built. Loading is told apart: each
worker reads the whole teacher into its host's memory before it drops what is not its part. glibc gives freed tensors back to the
kernel here, as a GPU's allocator reuses them; with a CPU worker's own settings what loading took stays with the process.
"""

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from torch import Tensor

from tests.benchmarks.process import peak_rss_mib
from tests.benchmarks.rounds import Bar, Comparison
from tests.trainables.jobs import Recorded, config, equal, no_telemetry, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build, train_epoch

WORKERS, MODEL, SHORT_MODEL, IMAGE_SIZE = 2, "vit_l_16", "vit_b_16", 32
MOST = Bar("≤", 0.6)


class Measured(NamedTuple):
    """Of one worker; memory in MiB."""

    training: float
    loading: float
    step_ms: float
    state: dict[str, Tensor]


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    model = SHORT_MODEL if short else MODEL
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
        weights = write_teacher(Path(name, "teacher.safetensors"), model, image_size=IMAGE_SIZE)
        found: dict[int, tuple[Measured, Measured]] = {}

        def training(number: int) -> tuple[float, float]:
            sides = [_measure(_job(Path(name, str(number), each), model, weights, each)) for each in ("sharded", "whole")]
            found[number] = sides[0], sides[1]
            assert equal(sides[0].state, sides[1].state), "both train the same bits"
            return sides[0].training, sides[1].training

        def of(field: str) -> Comparison:
            title = {"loading": "peak while the job is built", "step_ms": "a step"}[field]
            unit = "ms" if field == "step_ms" else "MiB"
            return Comparison(
                f"{title}, teacher sharded over {WORKERS} / whole",
                unit,
                lambda number: (getattr(found[number][0], field), getattr(found[number][1], field)),
                None,
            )

        title = f"peak memory of a worker in training, teacher sharded over {WORKERS} / whole"
        yield [Comparison(title, "MiB", training, MOST), of("loading"), of("step_ms")]


def _measure(settings: TrainConfig) -> Measured:
    """The larger of the workers' peaks."""
    pool = RankPool(WORKERS)
    try:
        workers = pool.run(WORKERS, train, settings)
    finally:
        pool.close()
    return Measured(
        *(max(getattr(each, name) for each in workers) for name in ("training", "loading", "step_ms")), workers[0].state
    )


def _job(folder: Path, model: str, weights: str, placement: str) -> TrainConfig:
    return config(
        folder,
        model="resnet8",
        precision="fp32",
        data={"path": "synthetic", "synthetic_images": 16, "image_size": IMAGE_SIZE, "global_batch_size": 4},
        teacher={"model": model, "weights": weights, "placement": placement},
        scale={"num_workers": WORKERS},
        train={"log_every": 2},
    )


def train(group: Group, settings: TrainConfig) -> Measured:
    """In a worker."""
    import torchvision.models  # noqa: F401  # no part of what is compared

    empty_mib = _resident_mib()
    with contextlib.closing(build(settings, group, report := Recorded(), no_telemetry)) as job:
        gc.collect()
        loading_mib = peak_rss_mib() - empty_mib
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        train_epoch(job)
        training_mib = peak_rss_mib() - empty_mib
        state = {name: tensor.detach().clone() for name, tensor in job.student.state_dict().items()}
    step_ms = [metrics["train/phase/step_ms"] for kind, _, metrics in report.calls if kind == "step"]
    return Measured(training_mib, loading_mib, min(step_ms), state)


def _resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20
