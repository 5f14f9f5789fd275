"""The network of a service computes what a worker's does, wherever it runs and however its images arrive."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainables.teachers.service.test_client import settings
from trainables.teachers.rows import RowFormat
from trainables.teachers.service.actor import served_network

CLASSES = tuple(str(label) for label in range(10))
IMAGES = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), dtype=np.uint8)
ROWS = RowFormat(10, exact_logits="float64")
CPU = torch.device("cpu")


def test_the_order_in_which_images_arrive_does_not_matter(tmp_path: Path) -> None:
    network, samples = served_network(settings(tmp_path, "ours"), CLASSES, ROWS, CPU), np.arange(10)
    whole = network(IMAGES, samples, 3)()
    assert (whole.shape, whole.dtype) == ((10,), ROWS.row)
    backwards = network(IMAGES[::-1], samples[::-1].copy(), 3)()
    assert backwards["logits"][::-1] == pytest.approx(whole["logits"], abs=1e-12)
    assert not np.allclose(network(IMAGES, samples, 4)()["logits"], whole["logits"])  # another epoch augments otherwise


@pytest.mark.gpu
def test_a_gpu_has_the_next_batch_while_it_computes_one(tmp_path: Path) -> None:
    job = settings(tmp_path, "ours")
    ours, peer = (served_network(job, CLASSES, ROWS, torch.device(device)) for device in ("cuda", "cpu"))
    ours(IMAGES, np.arange(10), 0)()  # kernels are chosen
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [ours(IMAGES, np.arange(10), epoch) for epoch in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for epoch, wait in enumerate(launched):
        assert wait()["logits"] == pytest.approx(peer(IMAGES, np.arange(10), epoch)()["logits"], abs=1e-9)
