"""`distill cache`, and a training that then asks no teacher."""

from pathlib import Path

import pytest

from tests.integration.conftest import Distill, records
from tests.trainables.jobs import write_able_teacher

pytestmark = [pytest.mark.integration]


@pytest.mark.slow
def test_a_cache_that_was_filled_ahead_is_all_that_a_training_asks_for(distill: Distill, tmp_path: Path) -> None:
    weights = write_able_teacher(tmp_path / "teacher.safetensors")
    settings = (
        "--set",
        f"teacher={{model: mlp_large, weights: {weights}, cache: {tmp_path / 'logits'}, cache_epochs: 2}}",
        "--set",
        "data.augment=pad_crop_flip",
        "--set",
        "student.model=mlp_small",
        "--set",
        "distill.method=[kd, rkd]",
    )
    shown = distill.run("cache", distill.experiment, *settings)
    assert "note: teacher.cache: 1.49 MiB for 1,442 images × 2 epochs: logits 10 + pooled 256 in float16" in shown
    assert "holds the outputs for 2,884 images; 2,884 were computed now" in shown
    published = distill.run("cache", distill.experiment, *settings, "--publish", tmp_path / "logits")
    assert "note: --publish: " in published
    assert "with README.md and read_targets.py, holds the outputs for 2,884 images; 0 were computed now" in published
    assert (tmp_path / "logits" / "README.md").read_text().startswith("# Reinforced data set")
    distill.run("train", distill.experiment, *settings)
    (run,) = [folder for folder in distill.runs.iterdir() if not folder.name.startswith(".")]
    assert [record["metrics"]["epoch/train/teacher_images"] for record in records(run, "epoch")] == [0, 0]
