"""kd, dkd, dist, nkd, ttm, mlkd and logit standardisation beside references that were written from the papers alone."""

import pytest
import torch

from tests.trainables.methods.against import (
    EDGES,
    LABELS,
    Comparison,
    Inputs,
    Terms,
    assert_a_batch_may_be_empty,
    assert_as_the_reference,
    assert_gradients_are_the_references,
    assert_half_precision_is_near,
    at_edge,
)
from tests.trainables.methods.references import logits as reference
from tests.trainables.methods.references.basic import Array


def kd(inputs: Inputs, temperature: float = 4.0, hard: bool = False) -> Terms:
    if hard:
        return {"kl": reference.hard_label(inputs.student_BK, inputs.teacher_BK)}
    return {"kl": reference.kd(inputs.student_BK, inputs.teacher_BK, temperature)}


def dkd(inputs: Inputs, alpha: float = 1.0, beta: float = 8.0, temperature: float = 4.0) -> Terms:
    target, others = reference.dkd_parts(inputs.student_BK, inputs.teacher_BK, inputs.labels_B, temperature)
    return {"tckd": alpha * target, "nckd": beta * others}


def dist(inputs: Inputs, beta: float = 2.0, gamma: float = 2.0, temperature: float = 4.0) -> Terms:
    both = inputs.student_BK, inputs.teacher_BK
    return {"inter": beta * reference.dist_inter(*both, temperature), "intra": gamma * reference.dist_intra(*both, temperature)}


def nkd(inputs: Inputs, gamma: float = 1.5, temperature: float = 1.0) -> Terms:
    shifted = inputs.student_BK, inputs.teacher_BK, inputs.labels_B
    target = reference.nkd(*shifted, gamma=0.0)
    return {"target": target, "others": reference.nkd(*shifted, gamma, temperature) - target}


def ttm(inputs: Inputs, temperature: float = 10.0, weighted: bool = False) -> Terms:
    loss = reference.wttm if weighted else reference.ttm
    return {"kl": loss(inputs.student_BK, inputs.teacher_BK, 1 / temperature)}


def mlkd(inputs: Inputs, temperatures: tuple[float, ...] = (2.0, 3.0, 4.0, 5.0, 6.0)) -> Terms:
    instance, batch, category = reference.mlkd(inputs.student_BK, inputs.teacher_BK, temperatures)
    return {"instance": instance, "batch": batch, "class": category}


def standardised(inputs: Inputs) -> tuple[Array, Array]:
    return reference.standardise(inputs.student_BK), reference.standardise(inputs.teacher_BK)


def mlkd_standardised(inputs: Inputs) -> Terms:
    """The authors of the standardisation put it before the instances' level alone."""
    temperatures = (2.0, 3.0, 4.0, 5.0, 6.0)
    return {**mlkd(inputs), "instance": reference.mlkd(*standardised(inputs), temperatures)[0]}


LOSSES = {"kd": kd, "dkd": dkd, "dist": dist, "nkd": nkd, "ttm": ttm, "mlkd": mlkd}
OPTIONS = [
    *((name, {}) for name in LOSSES),
    ("kd", {"temperature": 1.0}),
    ("kd", {"hard": True}),
    ("dkd", {"alpha": 3.0, "beta": 0.5, "temperature": 1.0}),
    ("dist", {"temperature": 1.0, "beta": 0.5, "gamma": 3.0}),
    ("nkd", {"temperature": 3.0, "gamma": 2.0}),
    ("ttm", {"weighted": True}),
    ("ttm", {"weighted": True, "temperature": 1.25}),
    ("mlkd", {"temperatures": (1.0, 3.0)}),
]


def plain(name: str, options: dict[str, object]) -> Comparison:
    return Comparison(name, lambda inputs: LOSSES[name](inputs, **options), options)


def standardising(name: str) -> Comparison:
    def expected(inputs: Inputs) -> Terms:
        student, teacher = standardised(inputs)
        return LOSSES[name](Inputs(inputs.labels_B, student, teacher, [], [], {}))

    return Comparison(name, mlkd_standardised if name == "mlkd" else expected, {"standardize": True})


METHODS = [*(plain(name, dict(options)) for name, options in OPTIONS), *map(standardising, LOSSES)]
every_method = pytest.mark.parametrize("case", METHODS, ids=str)


@pytest.mark.parametrize("edge", EDGES)
@every_method
def test_values_are_the_references_and_gradients_are_finite(case: Comparison, edge: str) -> None:
    assert_as_the_reference(*at_edge(case, edge))


@every_method
def test_so_they_are_with_one_class_present_or_two_at_all_and_for_models_that_are_sure(case: Comparison) -> None:
    student, teacher = ([side[0]] for side in case.answers())
    of_one_class = LABELS * 0
    two_classes = [student[0][:, :2]], [teacher[0][:, :2]], LABELS % 2
    sure = torch.eye(5)[LABELS].double().numpy()
    for about in (
        (student, teacher, of_one_class),
        two_classes,
        ([60 * sure], teacher, LABELS),
        (student, [60 * sure], LABELS),
        ([-60 * sure], [60 * sure], LABELS),
    ):
        assert_as_the_reference(case, *about)


@every_method
def test_gradients_are_those_of_the_reference(case: Comparison) -> None:
    assert_gradients_are_the_references(case)


@every_method
def test_logits_in_half_precision_give_nearly_the_same_and_huge_ones_stay_finite(case: Comparison) -> None:
    assert_half_precision_is_near(case)


@every_method
def test_a_batch_may_be_empty(case: Comparison) -> None:
    assert_a_batch_may_be_empty(case)
