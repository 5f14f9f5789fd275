"""DIST, NKD, TTM, MLKD and logit standardisation: what is beside their formulas, and any number of workers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainables.methods.calls import make, samples
from tests.trainables.methods.split import Case, assert_ranks_equal_one, draw
from trainables.distributed.rank_pool import RankPool
from trainables.methods.contract import ModelOutputs
from trainables.methods.registry import load_method

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


def terms_of(case: Case, student: Tensor, teacher: Tensor, labels: Tensor = LABELS, **more: Any) -> dict[str, Tensor]:
    method = case.make(num_classes=student.shape[1], **more)
    found: dict[str, Tensor] = method(ModelOutputs(student), ModelOutputs(teacher), samples(labels))
    return found


def test_ttm_and_wttm_have_each_a_weight_of_their_own_unless_one_is_given() -> None:
    options = load_method("ttm").Options.model_validate
    assert [options(given).weight for given in ({}, {"weighted": True}, {"weighted": True, "weight": 7.0})] == [45.0, 2.25, 7.0]


def test_standardised_logits_do_not_change_with_the_models_scale_and_offset() -> None:
    for case in (Case("kd"), Case("dkd"), Case("dist"), Case("nkd"), Case("ttm")):
        scaled = Case(case.name, {"standardize": True})
        one = terms_of(scaled, draw(8, 5, seed=0), draw(8, 5, seed=1))
        other = terms_of(scaled, 7 * draw(8, 5, seed=0) + 2, draw(8, 5, seed=1) - 4)
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", [Case("dist"), Case("kd", {"standardize": True}), Case("dist", {"standardize": True})], ids=str)
@pytest.mark.parametrize("value", [0.0, 3.3])
def test_a_student_that_says_one_thing_of_all_classes_is_not_thrown_far(case: Case, value: float) -> None:
    """As one whose last layer begins with zeros, whose deviation is 0 or what rounding made of it."""
    for dtype in (torch.float32, torch.float64):
        student = torch.full((8, 5), value, dtype=dtype, requires_grad=True)
        found = terms_of(case, student, draw(8, 5, seed=1).to(dtype))
        torch.stack([term.mean() for term in found.values()]).sum().backward()
        assert student.grad is not None
        assert student.grad.abs().max() < 10


@pytest.mark.parametrize("name", ["dist", "mlkd", "ttm"])
def test_a_student_that_answers_as_the_teacher_does_loses_nothing(name: str) -> None:
    options = {"temperature": 1.0} if name == "ttm" else {}
    found = terms_of(Case(name, options), draw(8, 5, seed=0), draw(8, 5, seed=0))
    assert all(term.abs().max() < 1e-3 for term in found.values())  # of dist 1e-8 beside the norms is left


def test_methods_that_compare_samples_say_so() -> None:
    assert {case.name for case in CASES if make(case.name).requires.whole_batch} == {"dist", "mlkd"}


@pytest.mark.parametrize("case", [Case("dkd"), Case("dml", {"peer": "mlp_small"}), *CASES], ids=str)
def test_any_number_of_ranks_says_what_one_does(ranks: RankPool, case: Case) -> None:
    assert_ranks_equal_one(ranks, case, (5, 0, 2))
