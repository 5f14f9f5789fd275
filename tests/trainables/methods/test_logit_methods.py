"""DIST, NKD, TTM, MLKD and logit standardisation, against sums written out and at the edges of what they may be given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainables.methods.calls import make, samples
from tests.trainables.methods.split import Case, answers, assert_ranks_equal_one, draw
from trainables.methods import load
from trainables.methods.contract import Seen
from trainables.methods.kd import soft_loss
from trainables.methods.logits import standardized
from trainables.rank_pool import Ranks

CASES = [
    Case("dist"),
    Case("dist", {"temperature": 1.0, "beta": 0.5}),
    Case("dist", {"standardize": True}),
    Case("nkd"),
    Case("nkd", {"temperature": 3.0, "gamma": 2.0}),
    Case("ttm"),
    Case("ttm", {"weighted": True, "temperature": 5.0}),
    Case("ttm", {"standardize": True}),
    Case("mlkd"),
    Case("mlkd", {"temperatures": (2.0,), "standardize": True}),
]
LABELS = torch.tensor([0, 4, 2, 4, 1, 0, 3, 3])


def said(case: Case, student: Tensor, teacher: Tensor, labels: Tensor = LABELS, **more: Any) -> dict[str, Tensor]:
    method = case.make(num_classes=student.shape[1], **more)
    found: dict[str, Tensor] = method(Seen(student), Seen(teacher), samples(labels))
    return found


def mean(case: Case, student: Tensor, teacher: Tensor, labels: Tensor = LABELS) -> Tensor:
    return torch.stack(
        [term.mean() if term.ndim and len(term) else term.sum() for term in said(case, student, teacher, labels).values()]
    ).sum()


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    exponentials = [math.exp(z / temperature) for z in logits]
    return [e / math.fsum(exponentials) for e in exponentials]


def pearson(a: list[float], b: list[float]) -> float:
    x, y = ([v - math.fsum(row) / len(row) for v in row] for row in (a, b))
    norms = math.sqrt(math.fsum(v * v for v in x)) * math.sqrt(math.fsum(v * v for v in y))
    return math.fsum(p * q for p, q in zip(x, y, strict=True)) / (norms + 1e-8)


def test_dist_correlates_each_samples_classes_and_each_classes_samples() -> None:
    student, teacher = draw(4, 3, seed=0), draw(4, 3, seed=1)
    ps, pt = ([softmax(row, 2.0) for row in logits.tolist()] for logits in (student, teacher))
    found = said(Case("dist", {"temperature": 2.0, "beta": 3.0, "gamma": 0.5}), student, teacher, LABELS[:4])
    inter = [12 * (1 - pearson(a, b)) for a, b in zip(ps, pt, strict=True)]
    intra = [2 * (1 - pearson([row[k] for row in ps], [row[k] for row in pt])) for k in range(3)]
    torch.testing.assert_close(found["inter"], torch.tensor(inter, dtype=torch.float64), rtol=1e-11, atol=1e-12)
    assert found["intra"].item() == pytest.approx(math.fsum(intra) / 3, rel=1e-11)


def test_nkd_is_the_targets_cross_entropy_and_that_of_the_others_normalised() -> None:
    student, teacher, label, scale = [1.0, -0.5, 0.25], [0.5, 2.0, -1.0], 1, 2.0
    found = said(
        Case("nkd", {"temperature": scale, "gamma": 1.5}),
        *(torch.tensor([z]).double() for z in (student, teacher)),
        torch.tensor([label]),
    )
    target = -softmax(teacher)[label] * math.log(softmax(student)[label])
    s, t = (softmax([z[0], z[2]], scale) for z in (student, teacher))
    others = -1.5 * scale**2 * (t[0] * math.log(s[0]) + t[1] * math.log(s[1]))
    assert found["target"].tolist() == pytest.approx([target], rel=1e-12)
    assert found["others"].tolist() == pytest.approx([others], rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_ttm_raises_the_teachers_probabilities_to_a_power_and_leaves_the_students(weighted: bool) -> None:
    student, teacher, gamma = [1.0, -0.5, 0.25], [0.5, 2.0, -1.0], 0.2
    powers = [p**gamma for p in softmax(teacher)]
    target = [p / math.fsum(powers) for p in powers]
    kl = math.fsum(p * math.log(p / q) for p, q in zip(target, softmax(student), strict=True))
    both = (torch.tensor([z]).double() for z in (student, teacher))
    found = said(Case("ttm", {"temperature": 1 / gamma, "weighted": weighted}), *both, torch.tensor([0]))
    assert found["kl"].tolist() == pytest.approx([kl * (math.fsum(powers) if weighted else 1)], rel=1e-12)


def test_ttm_and_wttm_have_each_a_weight_of_their_own_unless_one_is_given() -> None:
    options = load("ttm").Options.model_validate
    assert [options(given).weight for given in ({}, {"weighted": True}, {"weighted": True, "weight": 7.0})] == [45.0, 2.25, 7.0]


def test_mlkd_compares_instances_the_batch_and_the_classes_at_each_temperature() -> None:
    student, teacher = draw(3, 2, seed=0), draw(3, 2, seed=1)
    found = said(Case("mlkd", {"temperatures": (1.0, 3.0)}), student, teacher, LABELS[:3] % 2)
    batch = classes = 0.0
    for temperature in (1.0, 3.0):
        ps, pt = ([softmax(row, temperature) for row in logits.tolist()] for logits in (student, teacher))
        for i in range(3):
            for j in range(3):
                batch += math.fsum(ps[i][k] * ps[j][k] - pt[i][k] * pt[j][k] for k in range(2)) ** 2 / 3
        for k in range(2):
            for m in range(2):
                classes += math.fsum(ps[i][k] * ps[i][m] - pt[i][k] * pt[i][m] for i in range(3)) ** 2 / 2
    torch.testing.assert_close(found["instance"], soft_loss(student, teacher, 1.0) + soft_loss(student, teacher, 3.0))
    assert found["batch"].item() == pytest.approx(batch, rel=1e-11)
    assert found["class"].item() == pytest.approx(classes, rel=1e-11)


def test_standardised_logits_have_mean_0_and_an_unbiased_deviation_of_1() -> None:
    logits = draw(6, 7, seed=0, scale=5.0) + 3
    expected = (logits - logits.mean(-1, keepdim=True)) / (1e-7 + logits.std(-1, keepdim=True))
    torch.testing.assert_close(standardized(logits), expected, rtol=1e-12, atol=1e-14)
    for case in (Case("kd"), Case("dkd"), Case("dist"), Case("nkd"), Case("ttm")):
        scaled = Case(case.name, {"standardize": True})
        one = said(scaled, draw(8, 5, seed=0), draw(8, 5, seed=1))
        other = said(scaled, 7 * draw(8, 5, seed=0) + 2, draw(8, 5, seed=1) - 4)
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_is_that_of_finite_differences(case: Case) -> None:
    student, teacher = answers(case, 4)
    assert torch.autograd.gradcheck(lambda logits: mean(case, logits, teacher.logits_BK, LABELS[:4]), (student.logits_BK,))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_at_the_edges_losses_and_gradients_are_finite(case: Case) -> None:
    random, other = draw(8, 5, seed=0), draw(8, 5, seed=1)
    zeros, sure = torch.zeros(8, 5).double(), 200 * torch.eye(5)[torch.arange(8) % 5].double()
    equal = random[:1].expand(8, 5)
    pairs = [
        (random[:0], other[:0]), (random[:1], other[:1]), (random, random), (zeros, zeros), (zeros, other), (random, zeros),
        (equal, other), (random, equal), (equal, equal), (sure, other), (random, sure), (sure, -sure),
        (random[:, :2], other[:, :2]),
    ]  # fmt: skip
    for dtype in (torch.float64, torch.float32):
        for one, two in pairs:
            for labels in (LABELS % one.shape[1], torch.zeros(8, dtype=torch.int64)):
                student = one.to(dtype, copy=True).requires_grad_()
                found = said(case, student, two.to(dtype), labels[: len(one)])
                torch.stack([term.sum() for term in found.values()]).sum().backward()
                assert student.grad is not None
                assert all(term.isfinite().all() for term in found.values())
                assert student.grad.isfinite().all()
                assert all(term.shape in ((len(one),), ()) for term in found.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_near_float64_for_half_precision_logits_cast_up(case: Case) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        results = []
        for wide in (torch.float32, torch.float64):
            student = draw(8, 5, seed=0).to(dtype).to(wide).requires_grad_()
            loss = mean(case, student, draw(8, 5, seed=1).to(dtype).to(wide))
            loss.backward()
            assert student.grad is not None
            results.append((loss.double(), student.grad.double()))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=0.02, atol=1e-6)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("name", ["dist", "mlkd", "ttm"])
def test_a_student_that_answers_as_the_teacher_does_loses_nothing(name: str) -> None:
    options = {"temperature": 1.0} if name == "ttm" else {}
    found = said(Case(name, options), draw(8, 5, seed=0), draw(8, 5, seed=0))
    assert all(term.abs().max() < 1e-3 for term in found.values())  # of dist 1e-8 beside the norms is left


def test_methods_that_compare_samples_say_so() -> None:
    assert {case.name for case in CASES if make(case.name).compares_samples} == {"dist", "mlkd"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_ranks_says_what_one_does(ranks: Ranks, case: Case) -> None:
    assert_ranks_equal_one(ranks, case, (5, 3))
    assert_ranks_equal_one(ranks, case, (7, 0))
