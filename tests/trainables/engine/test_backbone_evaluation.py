"""A student without a classifier is trained on features alone, and measured by what its own are worth."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainables.data.image_folder import write_images
from tests.trainables.jobs import config, equal, relative_difference, train, write_teacher
from trainables.config import DataConfig, TrainConfig
from trainables.data.source import open_source
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.checkpoint import Progress
from trainables.errors import ExperimentError
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.models.model_input import student_input
from trainables.models.pixels import take_pixels
from trainables.models.registry import construct
from trainables.models.taps import Taps
from trainables.rundir import StageDir

DISTILL: dict[str, Any] = {"method": ["embed"], "task_weight": None, "options": {}}


def backbone(folder: Path, teacher: str = "convnet_large", **sections: Any) -> TrainConfig:
    """The student of a teacher of other classes, without labels."""
    section = {"model": teacher, "weights": write_teacher(folder / "teacher.safetensors", teacher, 7)}
    data = {"labels": False, **sections.pop("data", {})}
    defaults = {"model": "convnet_small", "distill": DISTILL, "scale": {"sync_batch_norm": True}, "optim": {"lr": 0.01}}
    return config(folder / "out", teacher=section, data=data, **{**defaults, **sections})


def epochs_of(calls: list[tuple[str, int, dict[str, float]]]) -> list[dict[str, float]]:
    return [metrics for kind, _, metrics in calls if kind == "epoch"]


def embeddings(settings: TrainConfig, state: dict[str, Tensor], split: Any) -> tuple[Tensor, Tensor]:
    """The embeddings by a student of these parameters, image after image, with their labels."""
    model = construct(settings.model, num_classes=0, image_size=8, seed=0).double()
    model.load_state_dict(state)
    taps = Taps(model, ["embedding"], name=settings.model, image_size=8)
    take_pixels(model, student_input(settings.data))
    model.eval()
    source = open_source(DataConfig(image_size=8), split)
    pixels = torch.stack([torch.from_numpy(np.array(source.read(index))) for index in range(len(source))])
    with torch.no_grad(), taps.capture():
        model(pixels.permute(0, 3, 1, 2).double() / 255)
        return taps.pop()[0], torch.from_numpy(source.labels_N)


def test_a_student_without_labels_is_the_same_on_any_number_of_workers(ranks: RankPool, tmp_path: Path) -> None:
    settings = backbone(tmp_path, eval={"path": "digits"}, optim={"epochs": 2, "lr": 0.01})
    one, two = (ranks.run(n, train, settings.model_copy(update={"output_dir": str(tmp_path / str(n))}))[0] for n in (1, 2))
    assert relative_difference(one["state"], two["state"]) < 1e-9
    for alone, shared in zip(epochs_of(one["calls"]), epochs_of(two["calls"]), strict=True):
        names = [name for name in alone if name.startswith("val/")]
        assert {"val/cka", "val/cosine", "val/loss", "val/top1_pct", "val/top5_pct", "val/num_images"} <= {*names}
        assert [alone[name] for name in names] == pytest.approx([shared[name] for name in names], rel=1e-9)
    assert "val/linear_top1_pct" not in epochs_of(one["calls"])[0]
    summary = one["calls"][-1][2]
    assert summary["linear_top1_pct"] > 50
    assert summary["best_top1_pct"] >= summary["top1_pct"] > 50
    assert not [name for name in summary if name.startswith("teacher")]
    header = read_checkpoint_header(StageDir(tmp_path / "1").best)
    assert header is not None
    assert header.num_classes == 0


def test_the_nearest_neighbors_of_the_students_embeddings_give_its_accuracy(tmp_path: Path) -> None:
    settings = backbone(tmp_path, eval={"path": "digits", "num_neighbors": 1})
    found = train(Group(), settings)
    (train_ND, labels_N), (val_MD, labels_M) = (embeddings(settings, found["state"], split) for split in ("train", "val"))
    nearest_M = (torch.nn.functional.normalize(val_MD) @ torch.nn.functional.normalize(train_ND).T).argmax(1)
    expected = 100 * (labels_N[nearest_M] == labels_M).double().mean().item()
    assert epochs_of(found["calls"])[-1]["val/top1_pct"] == pytest.approx(expected)


def test_without_eval_path_the_best_checkpoint_has_the_largest_cka(tmp_path: Path) -> None:
    settings = backbone(tmp_path, optim={"epochs": 3, "lr": 0.01})
    found = train(Group(), settings)
    ckas = [metrics["val/cka"] for metrics in epochs_of(found["calls"])]
    assert all(0 < cka < 1 for cka in ckas)
    summary = found["calls"][-1][2]
    assert summary["best_epoch"] == 1 + ckas.index(max(ckas))
    assert summary["cka"] == ckas[-1]
    assert "top1_pct" not in summary


def test_the_cosine_is_that_of_the_projected_embeddings_and_may_choose_the_best_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    options = {"embed": {"loss": "cosine", "map": 0}}
    settings = backbone(
        tmp_path, eval={"best": "cosine"}, distill={**DISTILL, "options": options}, optim={"epochs": 2, "lr": 0.01}
    )
    found = train(Group(), settings)
    epochs = epochs_of(found["calls"])
    assert [each["val/cosine"] for each in epochs] == pytest.approx([1 - each["val/loss"] for each in epochs], rel=1e-9)
    assert found["calls"][-1][2]["best_epoch"] == 1 + max(range(2), key=lambda n: epochs[n]["val/cosine"])
    queue = backbone(tmp_path, distill={**DISTILL, "method": ["queue"]})
    one, two = (ranks.run(n, train, queue.model_copy(update={"output_dir": str(tmp_path / str(n))}))[0] for n in (1, 2))
    (alone,), (shared,) = epochs_of(one["calls"]), epochs_of(two["calls"])
    assert -1 < alone["val/cosine"] < 1
    assert alone["val/cosine"] == pytest.approx(shared["val/cosine"], rel=1e-9)


def test_a_student_without_labels_resumes_bit_for_bit(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"optim": {"epochs": 2, "lr": 0.01}, "train": {"log_every": 4, "checkpoint_every": 6}}
    whole = train(Group(), backbone(tmp_path / "whole", **sections))
    settings = backbone(tmp_path / "parts", **sections)
    assert train(Group(), settings, die_after=6)["died"]
    resumed = train(Group(), settings)
    assert equal(whole["state"], resumed["state"])
    assert whole["progress"].best_score == resumed["progress"].best_score


def test_a_training_that_reaches_its_target_ends_with_a_linear_probe(tmp_path: Path) -> None:
    settings = backbone(tmp_path, eval={"path": "digits"}, optim={"epochs": 3, "lr": 0.01}, train={"until_top1_pct": 10})
    found = train(Group(), settings)
    assert len(epochs_of(found["calls"])) == 1
    assert found["calls"][-1][2]["linear_top1_pct"] > 50


def test_a_teacher_with_statistics_of_a_batch_is_compared_by_its_running_ones(ranks: RankPool, tmp_path: Path) -> None:
    data = {"path": "synthetic", "synthetic_images": 45, "global_batch_size": 8}  # the last batch has an image for one rank
    distill = {"method": ["reviewkd"], "task_weight": None, "options": {"reviewkd": {"teacher_norm": "batch"}}}
    settings = backbone(tmp_path, model="resnet8", teacher="resnet14", data=data, distill=distill)
    one, two = (ranks.run(n, train, settings.model_copy(update={"output_dir": str(tmp_path / str(n))}))[0] for n in (1, 2))
    (alone,), (shared,) = epochs_of(one["calls"]), epochs_of(two["calls"])
    assert alone["val/num_images"] == 9
    assert alone["val/cka"] == pytest.approx(shared["val/cka"], rel=1e-9)


def test_images_of_eval_path_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", num_train=6)
    next((images / "val").rglob("*.png")).write_bytes(b"no image")
    found = train(Group(), backbone(tmp_path, eval={"path": str(images)}, data={"max_bad": 0.5}))
    assert epochs_of(found["calls"])[-1]["epoch/skipped_images"] == 1


def test_a_best_checkpoint_by_a_number_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    for sections, says in (
        ({"eval": {"best": "top1_pct"}}, "eval.best top1_pct does not go with data.labels false"),
        ({"eval": {"best": "cka"}, "data": {"labels": True}}, "eval.best cka does not go with data.labels true"),
        (
            {"eval": {"best": "loss"}, "distill": {**DISTILL, "method": ["queue"]}},
            "distill.method: queue compares the images of a batch, which does not go with eval.best loss",
        ),
        ({"eval": {"best": "cosine"}, "distill": {**DISTILL, "method": ["rkd"]}}, "eval.best: cosine needs embed or queue"),
    ):
        with pytest.raises(ExperimentError, match=f"^{says}"):
            train(Group(), backbone(tmp_path, **sections))


def test_a_number_that_is_nan_is_no_best_score() -> None:
    progress = Progress(epoch=1)
    assert progress.update_best(None, None, None, 1.0)
    progress.epoch = 2
    assert progress.update_best(0.5, None, None, 1.0)
    assert not progress.update_best(None, None, None, 1.0)
    assert (progress.best_score, progress.best_epoch) == (0.5, 2)
