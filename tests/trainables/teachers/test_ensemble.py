"""An ensemble of teachers: the mean that methods read, which methods can use it, and whole trainings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trainables.jobs import config, relative_difference, train, write_teacher
from tests.trainables.methods.calls import make, terms
from tests.trainables.methods.references import logits as reference
from tests.trainables.methods.references.basic import Array, softmax
from tests.trainables.methods.references.training import several_teachers
from trainables.config import DataConfig, DistillConfig, MethodOptions, TeacherConfig, TrainConfig
from trainables.distributed.rank_pool import RankPool
from trainables.errors import CheckpointError
from trainables.methods.contract import Method, Requirements
from trainables.methods.select import SelectedMethod, select_methods
from trainables.models.model_input import ModelInput
from trainables.models.pixels import take_pixels
from trainables.models.weights import load_teacher
from trainables.rules import METHOD_RULES, first_problem_of_methods
from trainables.teachers.ensemble import EnsembleReader, mean_logits
from trainables.teachers.network import TeacherNetwork, load_network, teacher_reader

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
    outputs = EnsembleReader(nn.Identity(), SHARES, [name]).pop(teachers_BEK, 6)[name]
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
    outputs = EnsembleReader(nn.Identity(), SHARES, ["nkd"]).pop(sure_EK.log().expand(2, 2, 100), 2)["nkd"]
    target_B = terms(make("nkd", temperature=3.0), torch.zeros(2, 100), outputs, torch.tensor([0, 1]))["target"]
    np.testing.assert_allclose(target_B / np.log(100), [(0.99 + 2 * wrong) / 3, (wrong + 2 * 0.99) / 3], rtol=1e-6)


def given(folder: Path, *shares: float) -> TeacherConfig:
    """Teachers of several architectures with their weights in `folder`."""
    models = ("mlp_large", "convnet_small", "resnet8")
    weights = [write_teacher(folder / f"{model}.safetensors", model=model) for model in models]
    others = [
        {"model": model, "weights": path, "share": share}
        for model, path, share in zip(models[1:], weights[1:], shares[1:], strict=False)
    ]
    return TeacherConfig.model_validate({"model": models[0], "weights": weights[0], "share": shares[0], "others": others})


def test_the_teachers_are_loaded_and_frozen_and_answer_together(tmp_path: Path) -> None:
    teachers, chosen = given(tmp_path, 1.0, 2.0, 1.0), select_methods(DistillConfig())
    network = load_network(config(tmp_path / "job", teacher=teachers.model_dump()), CLASSES)
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    images_BCHW = draw(5, 3, 8, 8)
    answer_BK = TeacherNetwork(network, teacher_reader(teachers, network, chosen, 8))(images_BCHW, 4)["kd"].logits_at(4.0)
    expected = torch.zeros(4, 10, dtype=torch.float64)
    for each, share in zip((teachers, *teachers.others), (0.25, 0.5, 0.25), strict=True):
        assert each.weights is not None
        alone = load_teacher(each.model, each.weights, image_size=8, classes=CLASSES, seed=0)
        take_pixels(alone.double(), ModelInput(8, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        expected += share * (alone(images_BCHW[:4]) / 4).softmax(1)
    torch.testing.assert_close((answer_BK / 4).softmax(1), expected)


def test_one_teacher_of_other_classes_is_refused(tmp_path: Path) -> None:
    teachers = given(tmp_path, 1.0, 1.0)
    fewer = write_teacher(tmp_path / "fewer.safetensors", model="resnet8", num_classes=7)
    other = {"model": "resnet8", "weights": fewer}
    wrong = config(tmp_path / "job", teacher={**teachers.model_dump(), "others": [other]})
    with pytest.raises(CheckpointError, match="has 7 classes, none of them '7', and the data has 10"):
        load_network(wrong, CLASSES)


def first_problem_with(teachers: TeacherConfig, *methods: SelectedMethod) -> str | None:
    settings = TrainConfig(output_dir="/", data=DataConfig(), model="resnet8", teacher=teachers)
    return first_problem_of_methods(lambda: methods, settings, 10, METHOD_RULES)


def test_a_method_that_reads_features_is_refused_in_one_line(tmp_path: Path) -> None:
    teachers = given(tmp_path, 1.0, 1.0)
    reads = select_methods(DistillConfig.model_validate({"options": {"kd": {"teacher_taps": ["pooled"]}}}))
    assert first_problem_with(teachers, *reads) == (
        "distill.method: kd reads the features (pooled) of a teacher, and of 2 teachers there is only a mean of probabilities:"
        " leave out teacher.others, or take a method on logits, such as kd"
    )
    assert first_problem_with(teachers.model_copy(update={"others": ()}), *reads) is None


def test_a_method_that_uses_the_teachers_network_is_refused(tmp_path: Path) -> None:
    class Inspects(Method):
        terms = ("own",)
        requires = Requirements(teacher_model=True)

    problem = first_problem_with(given(tmp_path, 1.0, 1.0), SelectedMethod("own", Inspects, MethodOptions()))
    assert str(problem).startswith("distill.method: own reads the network of a teacher, and of 2 teachers there is only a mean")


def job(folder: Path, name: str) -> TrainConfig:
    return config(folder / name, teacher=given(folder, 1.0, 3.0).model_dump())


def test_two_workers_learn_from_several_teachers_what_one_does(tmp_path: Path, ranks: RankPool) -> None:
    (one,) = ranks.run(1, train, job(tmp_path, "one"))
    for each in ranks.run(2, train, job(tmp_path, "two")):
        assert relative_difference(one["state"], each["state"]) < 1e-9


def test_a_teacher_without_others_has_the_whole_share() -> None:
    assert TeacherConfig(model="resnet8", share=5.0).shares == (1.0,)
