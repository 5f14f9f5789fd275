"""SP, CC, RKD, PKT, IRG and CRD: what is beside their formulas, and any number of workers."""

import contextlib
from typing import Any

import pytest
import torch

from tests.trainables.methods.calls import make, samples
from tests.trainables.methods.split import Case, answers, assert_ranks_equal_one
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ExperimentError
from trainables.methods.rkd import angle_differences

MAPS: dict[str, Any] = {"student_shapes": ((2, 3, 3),), "teacher_shapes": ((3, 2, 2),)}
ROWS: dict[str, Any] = {"student_shapes": ((4,),), "teacher_shapes": ((6,),)}
GRAPH: dict[str, Any] = {
    "student_shapes": ((2, 4, 4), (4, 2, 2), (4,)),
    "teacher_shapes": ((3, 5, 5), (3, 2, 2), (3,)),
}
CASES = [
    Case("sp", **MAPS),
    Case("cc", **ROWS),
    Case("cc", {"variant": "repdistiller", "embedding": 3}, **ROWS),
    Case("rkd", **ROWS),
    Case("pkt", **ROWS),
    Case("pkt", {"variant": "paper"}, **ROWS),
    Case("irg", **GRAPH),
    Case("crd", {"negatives": 6, "embedding": 3}, **ROWS, steps=3),
    Case("crd", {"negatives": 50, "embedding": 3}, **ROWS),
]


def test_cc_has_for_each_variant_the_weight_of_its_source() -> None:
    options = type(make("cc", **ROWS)).Options.model_validate
    given = {"variant": "repdistiller"}
    assert [options(o).weight for o in ({}, given, {**given, "weight": 1.0})] == [100.0, 0.02, 1.0]


def test_rkds_angles_in_parts_are_those_of_the_whole() -> None:
    student, teacher = (outputs.features[0] for outputs in answers(Case("rkd", **ROWS), 7))
    losses = [angle_differences(student, teacher, chunk_size=size) for size in (1, 2 * 7 * 13, 10**6)]
    gradients = [torch.autograd.grad(loss, student)[0] for loss in losses]
    for loss, gradient in zip(losses[:2], gradients[:2], strict=True):
        torch.testing.assert_close(loss, losses[2], rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, gradients[2], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "student_shapes", "says"),
    [
        (
            "irg",
            ((2, 4, 4), (3, 2, 2), (4,)),
            "distill.options.irg.student_taps: irg reads an earlier and a later map (C, H, W), of as many",
        ),
        (
            "irg",
            ((2, 4, 4), (2, 8, 8), (4,)),
            "taps are (2, 4, 4), (2, 8, 8), (4,): name two such stages first",
        ),
        ("irg", ((2, 4, 4), (4,)), "but the student's taps are (2, 4, 4), (4,)"),
        ("irg", ((2, 4, 4), (2, 4, 4)), "name equally many"),
        (
            "sp",
            ((2, 4, 4), (2, 4, 4)),
            "sp.student_taps: sp reads one feature, but the student's taps are (2, 4, 4), (2, 4, 4): name one tap",
        ),
        ("crd", (), "crd reads one feature, but the student's taps are none"),
    ],
)
def test_features_that_do_not_fit_are_refused_in_one_line(name: str, student_shapes: Any, says: str) -> None:
    teacher_shapes = GRAPH["teacher_shapes"] if name == "irg" else ((4,),)
    with pytest.raises(ExperimentError) as caught:
        make(name, student_shapes=student_shapes, teacher_shapes=teacher_shapes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "crd" and "embedding" not in case.options], ids=str)
def test_a_student_that_sees_as_the_teacher_does_loses_nothing(case: Case) -> None:
    alike = Case(case.name, case.options, case.student_shapes, case.student_shapes)
    student, _ = answers(alike, 6)
    assert all(term.abs().max() < 1e-12 for term in alike.make()(student, student, samples(torch.arange(6) % 5)).values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_ranks_says_what_one_does(ranks: RankPool, case: Case) -> None:
    assert case.make().requires.whole_batch
    assert_ranks_equal_one(ranks, case, (5, 0, 2))


@pytest.mark.slow
def test_eight_ranks_say_what_one_does() -> None:
    crd = Case("crd", {"negatives": 6, "embedding": 3}, **ROWS, steps=3)
    with contextlib.closing(RankPool(8, fork_server=True)) as ranks:
        for case in (Case("sp", **MAPS), crd, Case("dml", {"peer": "mlp_small"}, steps=2)):
            assert_ranks_equal_one(ranks, case, (5, 0, 2, 3, 1, 1, 4, 0))
            assert_ranks_equal_one(ranks, case, (0, 0, 0, 2, 0, 0, 0, 1))
