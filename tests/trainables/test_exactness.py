"""N workers train what one worker trains; distilling with weight on the labels alone is training on labels."""

from pathlib import Path

import pytest
from torch import nn

from tests.trainables.jobs import config, equal, relative_difference, train, write_teacher
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import updates
from trainables.errors import TrainingError


@pytest.mark.parametrize(
    ("methods", "data"),
    [
        pytest.param(["kd"], {}, id="a last batch of 42"),
        pytest.param(["kd", "dkd"], {"path": "synthetic", "synthetic_images": 65}, id="a last batch of 1"),
        pytest.param(["kd", "dml"], {"path": "synthetic", "synthetic_images": 34}, id="a last batch of 2"),
    ],
)
def test_parameters_on_2_and_3_workers_equal_one_workers_to_1e_9(
    ranks: RankPool, tmp_path: Path, methods: list[str], data: dict[str, object]
) -> None:
    distill = {"method": methods, "options": {method: {"weight": 0.7, "warmup_epochs": 0} for method in methods}}
    options = {
        "teacher": {"weights": write_teacher(tmp_path / "teacher.safetensors")},
        "data": {"global_batch_size": 32 if data else 100, **data},
        "distill": distill,
        "optim": {"epochs": 2},
    }
    states = {n: ranks.run(n, train, config(tmp_path / str(n), **options))[0]["state"] for n in (1, 2, 3)}
    assert relative_difference(states[1], states[2]) < 1e-9
    assert relative_difference(states[1], states[3]) < 1e-9


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"global_batch_size": 100, "more": [{"path": "synthetic", "share": 0.3, "labels": False}]}, id="last 42"),
        pytest.param(
            {
                "global_batch_size": 96,
                "last_batch": "drop",
                "shuffle": "window(300)",
                "device_augment": {"mixup": 0.4},
                "more": [{"path": "synthetic", "share": 0.5, "labels": False}, {"path": "digits", "share": 0.1}],
            },
            id="mixed in pairs",
        ),
    ],
)
def test_sets_of_which_one_has_labels_train_the_same_on_2_and_3_workers(
    ranks: RankPool, tmp_path: Path, data: dict[str, object]
) -> None:
    options = {"teacher": {"weights": write_teacher(tmp_path / "teacher.safetensors")}, "data": data}
    found = {n: ranks.run(n, train, config(tmp_path / str(n), **options))[0] for n in (1, 2, 3)}
    parts = ranks.run(2, train, config(tmp_path / "parts", **options, optim={"accumulate": 3}))[0]
    for other in (found[2], found[3], parts):
        assert relative_difference(found[1]["state"], other["state"]) < 1e-9
        for name in ("loss", "task_loss", "top1_pct"):
            (row,), (its,) = found[1]["progress"].history, other["progress"].history
            assert row[f"epoch/train/{name}"] == pytest.approx(its[f"epoch/train/{name}"], rel=1e-9)


def test_images_without_labels_change_neither_the_loss_of_the_labels_nor_the_accuracy_in_training(tmp_path: Path) -> None:
    settings: dict[str, object] = {"optim": {"epochs": 1, "lr": 1e-12}, "distill": {"task_weight": 1.0, "options": {}}}
    settings["teacher"] = {"weights": write_teacher(tmp_path / "teacher.safetensors")}
    more = [{"path": "synthetic", "share": 0.5, "labels": False}]
    rows = [
        train(Group(), config(tmp_path / str(len(each)), **settings, data={"global_batch_size": size, "more": each}))
        for each, size in (([], 103), (more, 206))
    ]
    alone, mixed = (found["progress"].history[0] for found in rows)
    for name in ("task_loss", "top1_pct", "top5_pct"):
        assert mixed[f"epoch/train/{name}"] == pytest.approx(alone[f"epoch/train/{name}"], rel=1e-6)


def test_batch_norms_over_all_workers_see_no_blank_image_where_a_worker_has_none(ranks: RankPool, tmp_path: Path) -> None:
    options = {
        "model": "resnet8",
        "teacher": None,
        "scale": {"sync_batch_norm": True},
        "data": {"path": "synthetic", "synthetic_images": 65, "image_size": 16, "global_batch_size": 32},
    }
    states = {n: ranks.run(n, train, config(tmp_path / str(n), **options))[0]["state"] for n in (1, 3)}
    assert relative_difference(states[1], states[3]) < 1e-9


def test_gradient_accumulation_gives_the_parameters_of_the_whole_batch(ranks: RankPool, tmp_path: Path) -> None:
    teacher = {"weights": write_teacher(tmp_path / "teacher.safetensors")}
    whole = ranks.run(1, train, config(tmp_path / "whole", teacher=teacher))[0]["state"]
    for n in (1, 2):
        parts = ranks.run(n, train, config(tmp_path / f"parts{n}", teacher=teacher, optim={"accumulate": 3}))[0]["state"]
        assert relative_difference(whole, parts) < 1e-9


def test_a_student_that_learns_from_its_own_last_epoch_may_do_so_in_parts(ranks: RankPool, tmp_path: Path) -> None:
    own = {"teacher": None, "distill": {"method": ["pskd"], "task_weight": None, "options": {}}}
    whole, parts = (
        ranks.run(1, train, config(tmp_path / str(n), **own, optim={"epochs": 2, "accumulate": n}))[0]["state"] for n in (1, 3)
    )
    assert relative_difference(whole, parts) < 1e-9


@pytest.mark.parametrize("world_size", [1, 2])
def test_task_weight_alone_is_training_without_a_teacher_bit_for_bit(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    settings = {"model": "convnet_small", "precision": "fp32", "data": {"last_batch": "drop"}}
    weights = write_teacher(tmp_path / "teacher.safetensors")
    alone = ranks.run(world_size, train, config(tmp_path / "alone", teacher=None, **settings))
    labels = {"task_weight": 1.0, "options": {"kd": {"weight": 0.0}}}
    distilled = ranks.run(world_size, train, config(tmp_path / "kd", teacher={"weights": weights}, distill=labels, **settings))
    for a, b in zip(alone, distilled, strict=True):
        assert equal(a["state"], b["state"])


def test_a_teacher_changes_what_is_learned(ranks: RankPool, tmp_path: Path) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors")
    alone = ranks.run(1, train, config(tmp_path / "alone", teacher=None))[0]["state"]
    distilled = ranks.run(1, train, config(tmp_path / "kd", teacher={"weights": weights}))[0]["state"]
    assert relative_difference(alone, distilled) > 1e-3


class Careless(nn.Module):
    """Calls the module that DDP wraps."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, *batch: object) -> object:
        return self.wrapped.module(*batch)  # type: ignore[operator, union-attr]


def train_through_module(group: Group, settings: object) -> object:
    """What a careless method does: it calls the student behind DDP's back."""
    proper = updates.wrap
    updates.wrap = lambda distillation_module, group: Careless(proper(distillation_module, group))
    try:
        return train(group, settings)  # type: ignore[arg-type]
    finally:
        updates.wrap = proper


def test_replicas_that_train_alone_stop_the_run_with_one_line(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"rank 1 differ from rank 0's: .* around DDP \(`\.module`\)") as caught:
        ranks.run(2, train_through_module, config(tmp_path, teacher=None))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()
