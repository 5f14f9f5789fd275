"""A worker that visits several points keeps nothing of the earlier ones: neither decoders nor the memory of their batches."""

import contextlib
import gc
import weakref
from pathlib import Path

import pytest
import torch

from tests.trainables.jobs import Recorded, config, no_telemetry
from trainables.data.jpeg import Region
from trainables.device import decode
from trainables.device.decode import region_decoder
from trainables.device.memory import release_device
from trainables.distributed.group import Group
from trainables.engine.train import build, run_job

CPU = torch.device("cpu")


class Empty:
    """A decoder that decodes nothing."""

    def __init__(self, device: torch.device, threads: int) -> None: ...

    def decode(self, regions: list[Region]) -> list[torch.Tensor | None]:
        return [None] * len(regions)


def test_decoders_of_earlier_points_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "make_decoder", Empty)
    decoders = [weakref.ref(region_decoder(CPU, threads)) for threads in (2, 4)]
    assert all(decoder() is not None for decoder in decoders)
    release_device(CPU)
    assert all(decoder() is None for decoder in decoders)


def test_nothing_refers_to_the_batches_of_a_job_that_is_closed(tmp_path: Path) -> None:
    settings = config(tmp_path, teacher=None, train={"max_steps": 10})
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
        run_job(job)
    memories = [weakref.ref(loader._reader.memory) for loader in (job.train_loader, job.val_loader)]
    del job
    gc.collect()
    assert all(memory() is None for memory in memories)
