"""Several teachers: the mean that methods on logits read, the losses of others with each of them, and whole trainings."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, relative_difference, train, write_teacher
from tests.trainables.methods.calls import make, terms
from tests.trainables.methods.references import logits as reference
from tests.trainables.methods.references.basic import Array, softmax
from tests.trainables.methods.references.training import several_teachers
from trainables.config import DistillConfig, TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.dry_run import check_fit
from trainables.engine.modules import stage_methods
from trainables.engine.passes import run_student, run_teacher
from trainables.engine.train import build
from trainables.errors import CheckpointError, ExperimentError, ModelError
from trainables.methods.contract import ModelOutputs
from trainables.methods.select import for_teachers, select_methods
from trainables.models.model_input import ModelInput
from trainables.models.pixels import take_pixels
from trainables.models.taps import Taps
from trainables.models.weights import load_teacher
from trainables.teachers.ensemble import combine, mean_logits
from trainables.teachers.network import TeacherNetwork, load_networks, teacher_readers

CLASSES = [str(label) for label in range(10)]


def draw(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.2, 0.7, 0.1)])
def test_kd_from_the_mean_is_kd_from_the_mean_of_probabilities(temperature: float, shares: tuple[float, ...]) -> None:
    logits_BEK, student_BK = draw(6, len(shares), 5, seed=1), draw(6, 5).requires_grad_()
    mean_BK = mean_logits(logits_BEK, shares, temperature)
    method = make("kd", temperature=temperature)
    (loss_B,) = terms(method, student_BK, mean_BK, torch.zeros(6, dtype=torch.int64)).values()
    each = [logits_BEK[:, number].numpy() for number in range(len(shares))]
    expected = several_teachers(student_BK.detach().numpy(), each, shares, temperature)
    np.testing.assert_allclose(loss_B.detach(), expected, rtol=1e-10)
    # Its gradient is that of the weighted sum of the losses from each teacher.
    (gradient,) = torch.autograd.grad(loss_B.sum(), student_BK)
    target = sum(share * (logits_BEK[:, number] / temperature).softmax(1) for number, share in enumerate(shares))
    torch.testing.assert_close(gradient, temperature * ((student_BK / temperature).softmax(1) - target).detach())


def test_equal_teachers_are_as_one_and_huge_logits_stay_finite() -> None:
    logits_BK = draw(4, 5)
    mean_BK = mean_logits(torch.stack([logits_BK, logits_BK], dim=1), (0.25, 0.75), 3.0)
    torch.testing.assert_close((mean_BK / 3).softmax(1), (logits_BK / 3).softmax(1))
    opposite_BEK = torch.tensor([[[1e4, -1e4], [-1e4, 1e4]]])
    assert mean_logits(opposite_BEK, (0.5, 0.5), 1.0).softmax(1).tolist() == [[0.5, 0.5]]


SHARES = (1 / 3, 2 / 3)
LABELS_B = np.arange(6) % 5


def mean_of(logits_BEK: Tensor) -> ModelOutputs:
    """What a method reads of teachers with these logits."""
    return combine([{"kd": ModelOutputs(each_BK)} for each_BK in logits_BEK.unbind(1)], SHARES)["kd"]


def mean_at(logits_BEK: Tensor, temperature: float) -> Array:
    """Logits whose softmax at this temperature is the mean of the models' probabilities there."""
    parts = [share * np.array([softmax(row / temperature) for row in logits_BEK[:, e].numpy()]) for e, share in enumerate(SHARES)]
    return temperature * np.log(sum(parts))


def nkd(student_BK: Array, teachers_BEK: Tensor) -> dict[str, Array]:
    target_B = reference.nkd(student_BK, mean_at(teachers_BEK, 1.0), LABELS_B, gamma=0.0)
    others_B = reference.nkd(student_BK, mean_at(teachers_BEK, 3.0), LABELS_B, 1.5, 3.0, target_weight=0.0)
    return {"target": target_B, "others": others_B}


def wttm(student_BK: Array, teachers_BEK: Tensor) -> dict[str, Array]:
    weights_B = np.array([(softmax(row) ** (1 / 3)).sum() for row in mean_at(teachers_BEK, 1.0)])
    return {"kl": weights_B * reference.ttm(student_BK, mean_at(teachers_BEK, 3.0), 1 / 3)}


def mlkd(student_BK: Array, teachers_BEK: Tensor) -> dict[str, Array]:
    levels = [reference.mlkd(student_BK, mean_at(teachers_BEK, t), (t,)) for t in (2.0, 3.0)]
    return dict(zip(("instance", "batch", "class"), (np.sum(level, axis=0) for level in zip(*levels, strict=True)), strict=True))


def dkd(student_BK: Array, teachers_BEK: Tensor) -> dict[str, Array]:
    tckd_B, nckd_B = reference.dkd_parts(student_BK, mean_at(teachers_BEK, 3.0), LABELS_B, 3.0)
    return {"tckd": tckd_B, "nckd": 8 * nckd_B}


def dist(student_BK: Array, teachers_BEK: Tensor) -> dict[str, Array]:
    both = student_BK, mean_at(teachers_BEK, 3.0), 3.0
    return {"inter": 2 * reference.dist_inter(*both), "intra": np.array(2 * reference.dist_intra(*both))}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("nkd", {"temperature": 3.0}, nkd),
        ("ttm", {"temperature": 3.0, "weighted": True}, wttm),
        ("mlkd", {"temperatures": (2.0, 3.0)}, mlkd),
        ("dkd", {"temperature": 3.0}, dkd),
        ("dist", {"temperature": 3.0}, dist),
    ],
)
def test_a_method_reads_the_mean_of_probabilities_at_each_of_its_temperatures(
    name: str, options: dict[str, Any], expected: Callable[[Array, Tensor], dict[str, Array]]
) -> None:
    teachers_BEK, student_BK = draw(8, 2, 5, seed=1), draw(6, 5)
    outputs = mean_of(teachers_BEK[:6])
    found = terms(make(name, **options), student_BK, outputs, torch.as_tensor(LABELS_B))
    reference_terms = expected(student_BK.numpy(), teachers_BEK[:6])
    assert found.keys() == reference_terms.keys()
    for term, values in found.items():
        np.testing.assert_allclose(values, reference_terms[term], rtol=1e-9)


def test_two_sure_teachers_of_different_classes_are_as_sure_as_their_mean() -> None:
    """NKD's T_t is 1/3·0.99 and 2/3·0.99 at any λ."""
    wrong = 0.01 / 99
    sure_EK = torch.full((2, 100), wrong, dtype=torch.float64)
    sure_EK[0, 0] = sure_EK[1, 1] = 0.99
    outputs = mean_of(sure_EK.log().expand(2, 2, 100))
    target_B = terms(make("nkd", temperature=3.0), torch.zeros(2, 100), outputs, torch.tensor([0, 1]))["target"]
    np.testing.assert_allclose(target_B / np.log(100), [(0.99 + 2 * wrong) / 3, (wrong + 2 * 0.99) / 3], rtol=1e-6)


def given(folder: Path, *shares: float) -> list[dict[str, Any]]:
    """Teachers of several architectures with their weights in `folder`."""
    models = ("mlp_large", "resnet8", "convnet_large")
    return [
        {"model": model, "share": share, "weights": write_teacher(folder / f"{model}.safetensors", model)}
        for model, share in zip(models, shares, strict=False)
    ]


def job(folder: Path, name: str, *shares: float, **sections: Any) -> TrainConfig:
    """A training from several teachers with these shares."""
    return config(folder / name, **{"teacher": None, "teachers": given(folder, *shares), **sections})


def test_the_teachers_are_loaded_and_frozen_and_answer_together(tmp_path: Path) -> None:
    settings = job(tmp_path, "job", 1.0, 2.0, 1.0)
    networks = load_networks(settings, CLASSES)
    assert not any(network.training for network in networks)
    assert not any(parameter.requires_grad for network in networks for parameter in network.parameters())
    images_BCHW = draw(5, 3, 8, 8)
    readers = teacher_readers(settings, networks, select_methods(DistillConfig()))
    answer_BK = TeacherNetwork(networks, readers, settings.shares)(images_BCHW, 4)["kd"].logits_at(4.0)
    expected = torch.zeros(4, 10, dtype=torch.float64)
    for each, share in zip(settings.teachers, (0.25, 0.5, 0.25), strict=True):
        alone = load_teacher(each.model, each.weights, image_size=8, classes=CLASSES, seed=0)
        take_pixels(alone.double(), ModelInput(8, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        expected += share * (alone(images_BCHW[:4]) / 4).softmax(1)
    torch.testing.assert_close((answer_BK / 4).softmax(1), expected)


def test_the_line_about_a_broken_teacher_says_which_it_is(tmp_path: Path) -> None:
    teachers = given(tmp_path, 1.0, 1.0)
    fewer = write_teacher(tmp_path / "fewer.safetensors", model="resnet8", num_classes=7)
    wrong = job(tmp_path, "job", teachers=[*teachers, {"model": "resnet8", "weights": fewer}])
    with pytest.raises(CheckpointError, match=r"^teachers\[2\]: .*has 7 classes, none of them '7', and the data has 10"):
        load_networks(wrong, CLASSES)
    Path(teachers[1]["weights"]).write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"^teachers\[1\]: .*resnet8.safetensors"):
        load_networks(wrong, CLASSES)
    taps = {"method": ["fitnet"], "options": {"fitnet": {"teacher_taps": ["stage2"], "student_taps": ["pooled"]}}}
    with pytest.raises(ModelError, match=r"^teachers\[0\]: model mlp_large has no stage2"):
        check_fit(job(tmp_path, "job", 1.0, 1.0, 1.0, distill=taps), 10)


def test_with_one_teacher_in_the_list_keys_and_share_are_those_of_one(tmp_path: Path) -> None:
    settings = job(tmp_path, "job", 5.0, model="convnet_small", distill=DISTILL)
    assert settings.shares == (1.0,)
    assert [each.key for each in stage_methods(settings)] == ["kd", "embed", "sp"]
    settings = job(tmp_path, "job", 1.0, 3.0, model="convnet_small", distill=DISTILL)
    methods = {each.key: each.options.weight for each in stage_methods(settings)}
    assert methods == {"kd": 1.0, "embed1": 0.5, "embed2": 1.5, "sp1": 0.25, "sp2": 0.75}


def test_a_method_with_the_name_that_another_has_with_a_teacher_is_refused() -> None:
    (rkd,), (kd,) = (select_methods(DistillConfig(method=(name,))) for name in ("rkd", "kd"))
    with pytest.raises(ExperimentError, match=r"^distill.method: rkd1 is also the name of another method's copy for a teacher"):
        for_teachers([rkd, kd._replace(key="rkd1")], (0.5, 0.5))


POOLED = {"student_taps": ["pooled"], "teacher_taps": ["pooled"]}
DISTILL = {
    "method": ["kd", "embed", "sp"],
    "task_weight": 0.3,
    "options": {
        "kd": {"weight": 1.0},
        "embed": {**POOLED, "weight": 2.0, "map": 0, "standardize": "phi_s", "standardize_images": 200, "balance": True},
        "sp": {"weight": 1.0, **POOLED},
    },
}
"""A method on logits, one with parameters and buffers, and one that compares the images of a batch."""


def unlike(folder: Path, name: str, **sections: Any) -> TrainConfig:
    """Two teachers of different widths, by methods on logits and on features."""
    return job(folder, name, 1.0, 3.0, **{"distill": DISTILL, **sections})


def test_two_workers_learn_from_several_teachers_what_one_does(tmp_path: Path, ranks: RankPool) -> None:
    (one,) = ranks.run(1, train, unlike(tmp_path, "one"))
    for each in ranks.run(2, train, unlike(tmp_path, "two")):
        assert relative_difference(one["state"], each["state"]) < 1e-9
    named = one["calls"][1][2]
    assert {"train/kd/kl", "train/embed1/embedding", "train/embed2/embedding", "train/sp1/similarity"} <= named.keys()


def test_a_training_from_several_teachers_resumes_bit_for_bit(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"log_every": 2, "checkpoint_every": 6}}
    sections["distill"] = {
        "method": ["embed", "queue"],
        "teacher_dropping": 0.5,
        "options": {"embed": {**POOLED, "map": 0, "balance": True}, "queue": {**POOLED, "map": 0}},
    }
    whole = train(Group(), unlike(tmp_path, "whole", **sections))
    assert train(Group(), unlike(tmp_path, "parts", **sections), die_after=6)["died"]
    assert equal(whole["state"], train(Group(), unlike(tmp_path, "parts", **sections))["state"])


@pytest.mark.parametrize("shares", [(0.25, 0.75), (0.5, 0.5)])
def test_the_loss_is_the_sum_of_each_teachers_by_its_share(tmp_path: Path, shares: tuple[float, float]) -> None:
    """In float64, from the features of the models alone. Equal shares are the mean over teachers, as in Theia."""
    distill = {
        "method": ["embed"],
        "task_weight": None,
        "options": {"embed": {**POOLED, "weight": 2.0, "map": 0, "loss": "mse", "layers": 1}},
    }
    settings = job(tmp_path, "job", *shares, distill=distill, data={"labels": False})
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as built:
        state = built.train_state
        batch = next(iter(on_device(built.train_loader.epoch(0), torch.device("cpu"))))
        prepared = state.prepare(batch)
        state.distillation_module.eval()
        _, losses = run_student(state, prepared.images_BCHW, prepared, run_teacher(state, prepared), 0.0)
        heads = [state.distillation_module.methods_by_name[key].heads["embedding"][0] for key in ("embed1", "embed2")]
        student_BD = pooled(state.distillation_module.student, settings.model, prepared.images_BCHW)
        expected_B = torch.zeros(len(batch.labels_B), dtype=torch.float64)
        for each, head, share in zip(settings.teachers, heads, shares, strict=True):
            alone = load_teacher(each.model, each.weights, image_size=8, classes=CLASSES, seed=0).double()
            take_pixels(alone, ModelInput(8, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
            teacher_BE = pooled(alone, each.model, prepared.images_BCHW)
            projected_BE = student_BD @ head.weight.T + head.bias
            expected_B += 2.0 * share * ((projected_BE - teacher_BE) ** 2).mean(1)
    torch.testing.assert_close(losses.named["loss"], expected_B.detach(), rtol=1e-12, atol=0)


def pooled(model: nn.Module, name: str, images_BCHW: Tensor) -> Tensor:
    taps = Taps(model, ["pooled"], name=name, image_size=8)
    with torch.no_grad(), taps.capture():
        model(images_BCHW)
        (found_BD,) = taps.pop()
    return found_BD


def test_with_several_teachers_the_best_checkpoint_has_the_largest_mean_cka(tmp_path: Path, ranks: RankPool) -> None:
    embed = {"method": ["embed"], "task_weight": None, "options": {"embed": {**POOLED, "map": 0}}}
    sections = {"model": "convnet_small", "distill": embed, "data": {"labels": False}, "scale": {"sync_batch_norm": True}}
    one, two = (ranks.run(n, train, unlike(tmp_path, str(n), **sections))[0] for n in (1, 2))
    (epoch,) = (metrics for kind, _, metrics in one["calls"] if kind == "epoch")
    (other,) = (metrics for kind, _, metrics in two["calls"] if kind == "epoch")
    assert epoch["val/cka1"] != epoch["val/cka2"]
    assert epoch["val/cka"] == pytest.approx((epoch["val/cka1"] + 3 * epoch["val/cka2"]) / 4)
    assert [epoch[f"val/cka{n}"] for n in ("", 1, 2)] == pytest.approx([other[f"val/cka{n}"] for n in ("", 1, 2)], rel=1e-9)
