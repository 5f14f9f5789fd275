"""`precision: auto`: the rule, and what a job makes of it."""

import contextlib
import logging
from pathlib import Path

import pytest
import torch

from tests.trainables.jobs import Recorded, config, no_telemetry
from trainables.config import EvaluateConfig
from trainables.device import precision
from trainables.device.precision import choose_precision, name_without_bf16, with_precision
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build


@pytest.mark.parametrize(
    ("image_size", "without_bf16", "expected"),
    [
        (224, None, ("bf16", "images of 224 px, on GPUs that have it")),
        (384, None, ("bf16", "images of 384 px, on GPUs that have it")),
        (32, None, ("fp32", "launches bound the steps on images of 32 px, below 224")),
        (224, "Tesla V100", ("fp32", "Tesla V100 has no bf16")),
        (224, "a CPU", ("fp32", "a CPU has no bf16")),
    ],
)
def test_bf16_is_for_large_images_on_gpus_that_have_it(
    image_size: int, without_bf16: str | None, expected: tuple[str, str]
) -> None:
    assert choose_precision(image_size, without_bf16=without_bf16) == expected


def test_what_is_written_stays(tmp_path: Path) -> None:
    settings = config(tmp_path, precision="fp16")
    assert with_precision(settings, Group()).precision == settings.precision


def test_on_a_cpu_nothing_changes_and_the_log_has_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(tmp_path, precision="auto")
    with (
        caplog.at_level(logging.INFO, "raydistill"),
        contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job,
    ):
        assert (job.config.precision, job.config.precision_reason) == ("fp32", "a CPU has no bf16")
        assert not isinstance(job.train_state.autocast(), torch.autocast)
    assert "student: precision auto: fp32: a CPU has no bf16" in caplog.text


def test_an_evaluation_chooses_too(tmp_path: Path) -> None:
    settings = EvaluateConfig(checkpoint="x", output="y", data=config(tmp_path).data, precision="auto")
    assert with_precision(settings, Group()).precision == "fp32"


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [("cuda", "bf16", True), ("cuda", "fp16", True), ("cuda", "fp32", False), ("cpu", "fp32", True), ("cpu", "fp64", False)],
)
def test_models_are_channels_last_where_convolutions_are_faster(
    tmp_path: Path, device: str, precision: str, expected: bool
) -> None:
    group = Group(device=torch.device(device))
    assert with_precision(config(tmp_path, precision=precision), group).train.channels_last is expected
    chosen_by_hand = config(tmp_path, precision=precision, train={"channels_last": not expected})
    assert with_precision(chosen_by_hand, group).train.channels_last is not expected


def chosen(group: Group, image_size: int, old_ranks: tuple[int, ...]) -> tuple[str, str]:
    """On GPUs, some of them without bf16."""
    precision.name_without_bf16 = lambda _: "Tesla V100" if group.rank in old_ranks else None
    try:
        settings = config(Path("/nowhere"), precision="auto", data={"image_size": image_size})
        found = with_precision(settings, group)
    finally:
        precision.name_without_bf16 = name_without_bf16
    return found.precision, found.precision_reason


@pytest.mark.parametrize(("old_ranks", "expected"), [((), "bf16"), ((1,), "fp32"), ((0, 1), "fp32")])
def test_all_ranks_choose_alike_and_one_old_gpu_decides(ranks: RankPool, old_ranks: tuple[int, ...], expected: str) -> None:
    found = ranks.run(2, chosen, 224, old_ranks)
    assert found[0] == found[1]
    assert found[0][0] == expected


@pytest.mark.gpu
def test_this_gpu_has_bf16() -> None:
    device = torch.device("cuda")
    assert name_without_bf16(device) is None or not torch.cuda.is_bf16_supported(including_emulation=False)
