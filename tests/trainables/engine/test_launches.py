"""A step launches no more kernels than the plain loop of the same work, and its checks a handful."""

from pathlib import Path

import pytest
import torch

from tests.benchmarks.peers.device_loops import plain_step
from tests.gpu.contract import Settings
from tests.gpu.work import R56_R20, Pair, Stepper, device_batch, job_config, open_job
from tests.launches import Launches
from tests.trainables.engine.first_steps import fuse_optimizers
from trainables.distributed.group import Group, checksum
from trainables.models.registry import build_model

CPU = torch.device("cpu")
SMALL_R34_R18 = Pair("resnet34", "resnet18", 32, 100)
R20_R8 = Pair("resnet20", "resnet8", 32, 100)


@pytest.mark.parametrize(
    ("pair", "precision", "most"),
    [
        pytest.param(SMALL_R34_R18, "bf16", 374, marks=pytest.mark.slow),
        pytest.param(R56_R20, "fp32", 406, marks=pytest.mark.slow),
        (R20_R8, "bf16", 213),
        (R20_R8, "fp32", 184),
    ],
)
def test_a_step_launches_no_more_than_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair, precision: str, most: int
) -> None:
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # whose operations are not taken apart before they are counted
    batch = device_batch(pair, 2, CPU)
    with open_job(job_config(Settings("cpu", tmp_path), pair, 2, precision), CPU) as job:
        fuse_optimizers(job)
        ours = Stepper(job, batch)
        ours()
        with Launches() as of_ours:
            ours()
    models = [build_model(name, num_classes=pair.num_classes, image_size=32, seed=0) for name in (pair.teacher, pair.student)]
    plain = plain_step(models[0].eval().requires_grad_(False), models[1], batch.images_BCHW, batch.labels_B, precision)
    plain()
    with Launches() as of_plain:
        plain()
    assert of_ours.total <= most
    assert of_ours.total <= of_plain.total


def test_the_check_of_replicas_launches_a_handful_for_each_eight_million_numbers() -> None:
    model = build_model("resnet18", num_classes=10, image_size=32, seed=0).to(memory_format=torch.channels_last)
    with Launches() as launches:
        checksum(model.parameters(), Group().device)
    assert launches.total <= 2 * 7  # 11.2 million, in 62 tensors
