"""fitnet, at, ab, ft, fsp, nst, vid, kdsvd: what is beside their formulas, and any number of workers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trainables.methods.calls import init_parameters, make, samples
from trainables.config import init_epochs
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ExperimentError
from trainables.methods.ab import beyond_the_boundary
from trainables.methods.contract import Method, ModelOutputs
from trainables.methods.features import ConvReg, average_pooled, body_parameters, pooled_alike, unit
from trainables.methods.kdsvd import right_singular
from trainables.methods.registry import load_method
from trainables.models.registry import build_model

Shapes = tuple[tuple[int, ...], ...]
Maps = tuple[Tensor, ...]

STUDENT: Shapes = ((4, 6, 6), (6, 4, 3), (8, 2, 2))
TEACHER: dict[str, Shapes] = {
    "fitnet": ((5, 6, 6), (7, 2, 2), (9, 4, 4)),
    "at": ((5, 6, 6), (7, 3, 4), (9, 3, 3)),
    "nst": ((5, 6, 6), (7, 3, 4), (20, 3, 3)),
    "vid": ((5, 6, 6), (7, 3, 4), (9, 3, 3)),
    "ab": ((5, 6, 6), (6, 4, 3), (9, 4, 4)),
    "ft": ((5, 6, 6), (7, 3, 4), (9, 3, 3)),
    "fsp": ((4, 5, 6), (6, 3, 3), (8, 3, 3)),
    "kdsvd": ((4, 5, 6), (6, 3, 3), (8, 3, 3)),
}


def maps(shapes: Shapes, rows: int, seed: int) -> Maps:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, *shape, dtype=torch.float64, generator=generator) for shape in shapes)


def outputs_of(features: Maps) -> ModelOutputs:
    return ModelOutputs(features[0].new_zeros(len(features[0]), 5), features)


def all_terms(method: Method, student: Maps, teacher: Maps, group: Group | None = None) -> dict[str, Tensor]:
    """Its terms, in training and in the stage before."""
    rows = torch.zeros(len(student[0]), dtype=torch.int64)
    found: dict[str, Tensor] = {}
    for loss in ([method.init_loss] if method.init_terms else []) + ([method] if method.terms else []):
        found |= loss(outputs_of(student), outputs_of(teacher), samples(rows, group=group))
    return found


def built(name: str, **options: Any) -> Method:
    return make(name, student_shapes=STUDENT, teacher_shapes=TEACHER[name], **options)


def learned(method: Method, student: Maps, teacher: Maps) -> tuple[Tensor, list[Tensor]]:
    """The sum of all terms, and its gradients, of the student's maps and of all parameters."""
    leaves = [feature.clone().requires_grad_() for feature in student]
    total = torch.stack([term.sum() for term in all_terms(method, tuple(leaves), teacher).values()]).sum()
    wanted = [*leaves, *method.parameters()]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return total.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


@pytest.mark.parametrize("name", ["at", "nst", "fsp", "kdsvd"])
def test_a_student_like_its_teacher_loses_nothing(name: str) -> None:
    method, features = make(name, student_shapes=STUDENT, teacher_shapes=STUDENT), maps(STUDENT, 3, 0)
    total, gradients = learned(method, features, features)
    assert total.abs() < 1e-14
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-12


def on_a_rank(group: Group, name: str, sizes: tuple[int, ...]) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Terms of the own rows, their gradients, and the parameters' times the number of ranks, as DDP's mean wants them."""
    begin = sum(sizes[: group.rank])
    rows = slice(begin, begin + sizes[group.rank])
    student, teacher = maps(STUDENT, sum(sizes), 0), maps(TEACHER[name], sum(sizes), 1)
    method = make(name, student_shapes=STUDENT, teacher_shapes=TEACHER[name], group=group)
    leaves = tuple(feature[rows].clone().requires_grad_() for feature in student)
    terms = all_terms(method, leaves, tuple(feature[rows] for feature in teacher), group)
    total = torch.stack([term.sum() for term in terms.values()]).sum() / sum(sizes)
    own = list(method.parameters())
    found = torch.autograd.grad(total, [*leaves, *own], allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip([*leaves, *own], found, strict=True)]
    n = len(leaves)
    return {key: term.detach() for key, term in terms.items()}, gradients[:n], gradients[n:]


@pytest.mark.parametrize("name", TEACHER)
def test_three_workers_with_uneven_rows_equal_one(ranks: RankPool, name: str) -> None:
    sizes = (5, 0, 3)
    (terms, features, own) = on_a_rank(Group(), name, (sum(sizes),))
    parts = ranks.run(len(sizes), on_a_rank, name, sizes)
    for key, term in terms.items():
        torch.testing.assert_close(torch.cat([part[0][key] for part in parts]), term, rtol=1e-9, atol=1e-12)
    for number, gradient in enumerate(features):
        torch.testing.assert_close(torch.cat([part[1][number] for part in parts]), gradient, rtol=1e-9, atol=1e-12)
    for number, gradient in enumerate(own):
        torch.testing.assert_close(torch.stack([part[2][number] for part in parts]).sum(0), gradient, rtol=1e-9, atol=1e-12)


# What the methods calculate.


def only(method: Method, student: Maps, teacher: Maps) -> list[float]:
    (term,) = all_terms(method, student, teacher).values()
    found: list[float] = term.tolist()
    return found


def test_ab_pulls_each_value_to_its_side_of_the_margin_and_no_further() -> None:
    student = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    on, off = torch.tensor(0.1), torch.tensor(0.0)
    assert beyond_the_boundary(student, on, 1.0).tolist() == [3.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert beyond_the_boundary(student, off, 1.0).tolist() == [0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0]


def test_ab_counts_later_stages_more_and_adapts_only_maps_that_differ() -> None:
    shapes = {"student_shapes": ((1, 1, 1),) * 3, "teacher_shapes": ((1, 1, 1),) * 3}
    method, ones = make("ab", **shapes), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    assert [type(connector) for connector in method.connectors] == [nn.Identity] * 3
    for stage, weight in enumerate((0.25, 0.5, 1.0)):
        student = tuple(ones * (-2 if number == stage else 1) for number in range(3))
        assert only(method, student, (ones,) * 3) == pytest.approx([9 * weight * 3 / 1000])
        assert only(make("ab", variant="paper", **shapes), student, (ones,) * 3) == pytest.approx([9])
    adapted = built("ab").connectors
    assert [type(connector) for connector in adapted] == [ConvReg, nn.Identity, ConvReg]
    assert isinstance(adapted[0], ConvReg)
    assert isinstance(adapted[0].activation, nn.Identity)


def test_singular_vectors_are_those_of_both_gram_matrices_and_no_more_than_there_are() -> None:
    for channels, height in ((3, 4), (7, 2)):
        (features,) = maps(((channels, height, height),), 2, 0)
        values, vectors = right_singular(features, 6)
        assert vectors.shape == (2, channels, min(channels, height**2, 6))
        rows = np.linalg.svd(features.flatten(2).mT.numpy(), full_matrices=False)
        np.testing.assert_allclose(values.numpy(), rows[1][:, :6], rtol=1e-9)
        cosines = np.einsum("bck,bkc->bk", vectors.numpy(), rows[2][:, :6])
        np.testing.assert_allclose(np.abs(cosines), 1, rtol=1e-9)


def test_features_that_are_not_finite_raise_nothing_in_kdsvd() -> None:
    student = tuple(torch.full_like(x, torch.nan) for x in maps(STUDENT, 2, 0))
    all_terms(built("kdsvd"), student, maps(TEACHER["kdsvd"], 2, 1))


# What they need.


@pytest.mark.parametrize("name", ["ab", "fsp", "ft"])
def test_the_stage_before_training_is_as_long_as_the_options_say(name: str) -> None:
    assert init_epochs(built(name).options) == 30
    assert init_epochs(built(name, init_epochs=7).options) == 7


def test_the_stage_before_training_moves_what_its_loss_reaches() -> None:
    student = build_model("resnet8", num_classes=5, image_size=8, seed=0)
    body = {name for name, _ in student.named_parameters() if not name.startswith("fc.")}
    assert len(body) == len(list(student.parameters())) - 2
    assert {id(p) for p in body_parameters(student)} == {id(p) for name, p in student.named_parameters() if name in body}
    for name in ("ab", "fsp"):
        method = built(name)
        trained = [id(parameter) for parameter in method.init_stage_parameters(student)]
        assert trained == [id(p) for p in (*body_parameters(student), *method.parameters())]
    ft = built("ft")
    trained = {id(parameter) for parameter in ft.init_stage_parameters(student)}
    assert trained == {id(p) for name, p in ft.named_parameters() if not name.startswith("translators.")}


def test_after_its_init_stage_ft_trains_the_translator_alone() -> None:
    ft = built("ft", init_stage=False)
    assert {name.partition(".")[0] for name, p in ft.named_parameters() if p.requires_grad} == {"translators"}


@pytest.mark.parametrize("name", TEACHER)
def test_parameters_that_are_trained_together_all_get_a_gradient(name: str) -> None:
    """DDP waits for each of them."""
    method = built(name)
    wanted = [parameter for parameter in method.parameters() if parameter not in init_parameters(method)]
    if not method.terms or not wanted:
        return
    terms = method(
        outputs_of(maps(STUDENT, 3, 0)), outputs_of(maps(TEACHER[name], 3, 1)), samples(torch.zeros(3, dtype=torch.int64))
    )
    total = torch.stack([term.sum() for term in terms.values()]).sum()
    assert all(gradient is not None for gradient in torch.autograd.grad(total, wanted, allow_unused=True))


@pytest.mark.parametrize(
    ("name", "student", "teacher", "says"),
    [
        (
            "at",
            ((8,),),
            ((8, 2, 2),),
            "options.at.student_taps: at reads 1 or more maps (C, H, W), but the student's taps are (8,): name stages",
        ),
        ("vid", ((8, 2, 2),), ((4, 16),), "distill.options.vid.teacher_taps: vid reads 1 or more maps"),
        ("nst", ((8, 2, 2),) * 2, ((8, 2, 2),) * 3, "the student has 2 maps, the teacher 3"),
        ("ab", (), (), "ab reads 1 or more maps (C, H, W), but the student's taps are none"),
        ("fsp", ((8, 2, 2),), ((8, 2, 2),), "fsp reads 2 or more maps (C, H, W), but the student's taps are (8, 2, 2)"),
        ("kdsvd", ((8, 2, 2),), ((8, 2, 2),), "kdsvd reads 2 or more maps"),
        ("fsp", ((4, 2, 2), (8, 2, 2)), ((4, 2, 2), (9, 2, 2)), "the student's has 8 and the teacher's 9"),
        ("kdsvd", ((4, 2, 2), (8, 2, 2)), ((4, 2, 2), (9, 2, 2)), "the student's has 8 and the teacher's 9"),
        ("fitnet", ((4, 2, 2),), ((4, 3, 3),), "no regressor turns the student's map (4, 2, 2) into the teacher's (4, 3, 3)"),
    ],
)
def test_models_that_do_not_fit_are_refused_in_one_line(name: str, student: Shapes, teacher: Shapes, says: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        make(name, student_shapes=student, teacher_shapes=teacher)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stage_before_training_of_no_epochs_is_refused_where_nothing_else_is_learned() -> None:
    for name in ("ab", "fsp"):
        with pytest.raises(ValueError, match="init_epochs"):
            load_method(name).Options.model_validate({"init_epochs": 0})


# What they share.


def test_a_regressor_gives_the_teachers_shape() -> None:
    for student, teacher in (
        ((3, 8, 8), (5, 4, 4)),
        ((3, 4, 4), (5, 8, 8)),
        ((3, 4, 4), (5, 4, 4)),
        ((3, 7, 5), (5, 3, 4)),
        ((3, 8, 4), (5, 4, 4)),
    ):
        assert ConvReg(student, teacher, Group())(torch.zeros(2, *student)).shape == (2, *teacher)


def test_a_zero_vector_has_no_direction_and_no_gradient() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    direction = unit(x)
    torch.testing.assert_close(direction, torch.tensor([[0.0, 0.0], [0.6, 0.8]]))
    direction[:, 0].sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0.0, 0.0], [0.128, -0.096]]))


def test_of_two_maps_each_side_is_pooled_to_the_smaller() -> None:
    a, b = pooled_alike(*maps(((2, 6, 3), (3, 4, 5)), 2, 0))
    assert (a.shape, b.shape) == ((2, 2, 4, 3), (2, 3, 4, 3))
    (x,) = maps(((2, 8, 6),), 2, 0)
    for size in ((4, 3), (8, 2), (8, 6), (3, 4), (1, 1)):
        torch.testing.assert_close(average_pooled(x, *size), nn.functional.adaptive_avg_pool2d(x, size), rtol=1e-12, atol=1e-14)


def test_srrls_connector_begins_with_the_deviation_of_the_authors_code() -> None:
    teacher = nn.Linear(64, 5)
    method = make("srrl", student_shapes=((256, 2, 2),), teacher_shapes=((64,),), teacher=nn.Sequential(nn.Flatten(), teacher))
    weight = method.get_parameter("_connector.0.weight")
    assert weight.std().item() == pytest.approx((2 / 64) ** 0.5, rel=0.03)
