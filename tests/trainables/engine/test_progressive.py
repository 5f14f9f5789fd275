"""Progressive resizing: the student trains on smaller images first, and is evaluated on those of `data.image_size`."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, relative_difference, train, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build, run_job
from trainables.errors import ModelError
from trainables.teachers.network import TeacherNetwork

VIT = "timm/vit_tiny_patch16_224(depth=1, embed_dim=12, num_heads=2, patch_size=2, dynamic_img_size=True)"
PARTS = [{"epochs": 0.25, "image_size": 4}, {"epochs": 0.4, "image_size": 6}]


def settings(folder: Path, name: str, **sections: Any) -> TrainConfig:
    teacher = {"weights": write_teacher(folder / "teacher.safetensors")}
    own = {"data": {"global_batch_size": 600}, "train": {"progressive": PARTS, "checkpoint_every": 1}, "optim": {"epochs": 4}}
    return config(folder / name, **{"model": VIT, "teacher": teacher, **own, **sections})


def test_the_student_trains_on_each_size_in_its_epochs_and_is_evaluated_on_whole_crops_as_the_teacher_sees(
    tmp_path: Path,
) -> None:
    seen: dict[str, list[tuple[bool, int]]] = {"student": [], "teacher": []}

    def look(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, inputs: seen[name].append((module.training, inputs[0].shape[-1]))

    with contextlib.closing(build(settings(tmp_path, "run"), Group(), Recorded(), no_telemetry)) as job:
        assert isinstance(job.train_state.teacher, TeacherNetwork)
        job.student.register_forward_pre_hook(look("student"))
        job.train_state.teacher.networks[0].register_forward_pre_hook(look("teacher"))
        run_job(job)
    steps = job.train_loader.steps_per_epoch
    assert [size for training, size in seen["student"] if training] == [4] * steps + [6] * 2 * steps + [8] * steps
    assert {size for training, size in seen["student"] if not training} == {8}
    assert {size for _, size in seen["teacher"]} == {8}


def test_it_is_the_same_on_2_workers_and_after_a_death(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(1, train, settings(tmp_path, "1"))[0]
    two = ranks.run(2, train, settings(tmp_path, "2"))[0]
    assert relative_difference(whole["state"], two["state"]) < 1e-9
    assert ranks.run(1, train, settings(tmp_path, "pieces"), 4)[0]["died"]
    assert equal(whole["state"], ranks.run(1, train, settings(tmp_path, "pieces"))[0]["state"])


def test_a_timing_run_trains_at_the_size_of_the_crops(tmp_path: Path) -> None:
    timed = settings(tmp_path, "timed", train={"progressive": PARTS, "max_steps": 3})
    assert [timed.train_image_size(epoch) for epoch in range(4)] == [None] * 4


@pytest.mark.parametrize(("epochs", "sizes"), [(1, [4]), (3, [4, 6, None]), (20, [4] * 5 + [6] * 8 + [None] * 7)])
def test_shares_of_the_epochs_are_rounded_up(tmp_path: Path, epochs: int, sizes: list[int | None]) -> None:
    shares = settings(tmp_path, "shares", optim={"epochs": epochs})
    assert [shares.train_image_size(epoch) for epoch in range(epochs)] == sizes


def test_a_model_of_a_fixed_size_is_refused_with_what_to_write(tmp_path: Path) -> None:
    fixed = VIT.replace(", dynamic_img_size=True", "")
    with pytest.raises(ModelError, match=r"images of 4×4 .*: remove train.progressive, or .* student.args: {dynamic_img_size"):
        build(settings(tmp_path, "fixed", model=fixed), Group(), Recorded(), no_telemetry)
