"""Teacher dropping: which losses are left, by what they are divided, and that workers agree on both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainables.jobs import config, relative_difference, train, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ExperimentError
from trainables.methods.teacher_dropping import TeacherDropping

SHARES = (0.5, 0.2, 0.3)
TEACHERS = {"embed1": 0, "embed2": 1, "embed3": 2}
WEIGHTS = {key: 2.0 * SHARES[number] for key, number in TEACHERS.items()}


def weights(probability: float, losses_BE: Tensor, epoch: int = 0) -> Tensor:
    """What each loss is multiplied by, (B, E)."""
    dropping = TeacherDropping(probability, 7, TEACHERS, SHARES)
    halves = [{"embedding": 0.75 * loss_B, "map": 0.25 * loss_B} for loss_B in losses_BE.unbind(1)]
    indices_B = torch.arange(len(losses_BE))
    found = dropping.weights(dict(zip(TEACHERS, halves, strict=True)), WEIGHTS, epoch, indices_B, Gather(len(losses_BE), Group()))
    return torch.stack(list(found.values()), 1)


def losses(num_images: int) -> Tensor:
    return torch.rand(num_images, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_teacher_with_the_largest_loss_is_left_and_each_other_with_its_probability() -> None:
    losses_BE = losses(20_000)
    found_BE = weights(0.3, losses_BE)
    is_largest_BE = torch.nn.functional.one_hot(losses_BE.argmax(1), 3).bool()
    assert bool((found_BE[is_largest_BE] > 0).all())
    for number in range(3):
        others = found_BE[~is_largest_BE[:, number], number] > 0
        assert others.double().mean().item() == pytest.approx(0.7, abs=0.015)
    first, second = (found_BE[losses_BE.argmax(1) == 2][:, :2] > 0).double().unbind(1)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 0.04, "drawn one by one"
    assert not torch.equal(found_BE > 0, weights(0.3, losses_BE, epoch=1) > 0)
    assert torch.equal(found_BE[:100] > 0, weights(0.3, losses_BE[:100]) > 0), "a function of the sample"
    only_largest = weights(1.0, losses_BE) > 0
    assert torch.equal(only_largest, is_largest_BE)


def test_the_loss_is_divided_by_the_shares_that_are_left() -> None:
    losses_BE = losses(50)
    found_BE, shares_E = weights(0.5, losses_BE), torch.tensor(SHARES, dtype=torch.float64)
    left_BE = (found_BE > 0).double() * shares_E
    mean = (found_BE * losses_BE).mean(0).sum()
    torch.testing.assert_close(mean, 2.0 * (left_BE * losses_BE).sum() / left_BE.sum())
    torch.testing.assert_close(weights(0.0, losses_BE), 2.0 * shares_E.expand(50, 3))


def job(folder: Path, name: str, **distill: Any) -> TrainConfig:
    """On 2 workers one of which has fewer images of the last batch than the other."""
    taps = {"student_taps": ["pooled"], "teacher_taps": ["pooled"]}
    models = ("convnet_large", "resnet8")
    teachers = [{"model": each, "weights": write_teacher(folder / each, each), "share": n} for n, each in enumerate(models, 1)]
    options = {"embed": {**taps, "map": 0}, "rkd": taps}
    whole = {"method": ["embed"], "task_weight": 1.0, "teacher_dropping": 0.5, "options": options, **distill}
    return config(folder / name, teacher=None, teachers=teachers, model="mlp_small", distill=whole)


def test_two_workers_drop_the_teachers_that_one_does(tmp_path: Path, ranks: RankPool) -> None:
    (one,) = ranks.run(1, train, job(tmp_path, "one"))
    for each in ranks.run(2, train, job(tmp_path, "two")):
        assert relative_difference(one["state"], each["state"]) < 1e-9
    (off,) = ranks.run(1, train, job(tmp_path, "off", teacher_dropping=0.0))
    assert relative_difference(one["state"], off["state"]) > 1e-4


def test_a_loss_of_the_whole_batch_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"^distill.teacher_dropping: rkd1/\w+ is one loss for the whole batch"):
        train(Group(), job(tmp_path, "job", method=["rkd"]))
