"""Statistics of the teacher before the first step: of which images, on any number of workers, and once."""

import contextlib
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, relative_difference, train, write_teacher
from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.calibrate import calibrate
from trainables.engine.job import Job
from trainables.engine.train import build, run_job
from trainables.methods.standardize_features import FeatureStandardizer

TAPS = {"student_taps": ["pooled"], "teacher_taps": ["pooled"]}


def job(folder: Path, *, images: int = 10_000, **sections: Any) -> TrainConfig:
    """The imitation of an embedding that is standardized, in batches of 100 digits."""
    options = {"embed": {**TAPS, "map": 0, "loss": "mse", "standardize": "phi_s", "standardize_images": images}}
    teacher = {"model": "mlp_large", "weights": write_teacher(folder / "teacher.safetensors")}
    return config(
        folder / "student", teacher=teacher, distill={"method": "embed", "task_weight": 1.0, "options": options}, **sections
    )


@pytest.mark.parametrize(("images", "batches"), [(150, 2), (10**6, None)])
def test_the_images_are_those_that_the_training_begins_with(tmp_path: Path, images: int, batches: int | None) -> None:
    settings = job(tmp_path, images=images)
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as built:
        state, features = built.train_state, []
        calibrate(built)
        with contextlib.closing(on_device(built.train_loader.epoch(0), torch.device("cpu"))) as loaded:
            for batch in loaded:
                outputs = state.teacher(state.prepare(batch).images_BCHW, len(batch.labels_B))
                features.append(outputs["embed"].features[0])
        x_ND = torch.cat(features[:batches])
        y_ND = standardizer(built)(x_ND)
    assert len(features) > 2
    torch.testing.assert_close(y_ND.mean(0), torch.zeros_like(y_ND[0]), rtol=0, atol=1e-9)
    torch.testing.assert_close(y_ND.var(0, correction=0), torch.ones_like(y_ND[0]), rtol=1e-9, atol=0)


def test_workers_learn_what_one_does(ranks: RankPool, tmp_path: Path) -> None:
    settings = job(tmp_path, images=64, data={"global_batch_size": 32}, train={"checkpoint_every": 7})
    (alone,), several = (ranks.run(n, train, with_output(settings, tmp_path / str(n))) for n in (1, 3))
    assert all(relative_difference(alone["state"], each["state"]) < 1e-9 for each in several)


def test_a_job_that_was_cut_off_goes_on_with_the_same_statistics(tmp_path: Path) -> None:
    settings = job(tmp_path, train={"log_every": 1, "checkpoint_every": 3})
    undisturbed = train(Group(), with_output(settings, tmp_path / "whole"))
    assert train(Group(), settings, 6)["died"]
    assert equal(train(Group(), settings)["state"], undisturbed["state"])


def test_a_timing_run_takes_no_statistics(tmp_path: Path) -> None:
    settings = job(tmp_path, train={"max_steps": 2, "warmup_steps": 1})
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as built:
        assert run_job(built)["steps"] == 3
        assert not standardizer(built).mean_D.count_nonzero()


def standardizer(built: Job) -> FeatureStandardizer:
    return cast(FeatureStandardizer, built.train_state.distillation_module.get_submodule("methods.embed.standardizers.embedding"))


def with_output(settings: TrainConfig, folder: Path) -> TrainConfig:
    return settings.model_copy(update={"output_dir": str(folder)})
