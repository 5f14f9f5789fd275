"""sp, cc, rkd, pkt, irg and crd beside references that were written from the papers alone."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.trainables.methods.against import (
    EDGES,
    Comparison,
    Inputs,
    Terms,
    assert_a_batch_may_be_empty,
    assert_as_the_reference,
    assert_finite,
    assert_gradients_are_the_references,
    assert_half_precision_is_near,
    at_edge,
)
from tests.trainables.methods.calls import samples
from tests.trainables.methods.references import relations as reference
from tests.trainables.methods.references.basic import Array, Ints, derivatives
from trainables.methods.contract import ModelOutputs
from trainables.methods.crd import CRD

VECTORS: dict[str, Any] = {"student_shapes": ((4,),), "teacher_shapes": ((7,),)}


def sp(inputs: Inputs) -> Terms:
    return {"similarity": reference.sp(inputs.student[0], inputs.teacher[0])}


def cc(inputs: Inputs) -> Terms:
    return {"correlation": reference.cc(inputs.student[0], inputs.teacher[0])}


def cc_of_degree_4(inputs: Inputs) -> Terms:
    return {"correlation": reference.cc(inputs.student[0], inputs.teacher[0], gamma=1.5, order=4)}


def cc_repdistiller(inputs: Inputs) -> Terms:
    maps = [
        (inputs.parameters[f"embed_{side}.weight"], inputs.parameters[f"embed_{side}.bias"]) for side in ("student", "teacher")
    ]
    return {"correlation": reference.cc_repdistiller(inputs.student[0], inputs.teacher[0], *maps)}


def rkd(inputs: Inputs) -> Terms:
    both = inputs.student[0], inputs.teacher[0]
    return {"distance": 25 * reference.rkd_distance(*both), "angle": 50 * reference.rkd_angle(*both)}


def pkt(inputs: Inputs, variant: str = "repdistiller") -> Terms:
    return {"kl": reference.pkt(inputs.student[0], inputs.teacher[0], variant)}


def irg(inputs: Inputs) -> Terms:
    logits, features = (inputs.student_BK, inputs.teacher_BK), (inputs.student, inputs.teacher)
    vertices, edges, changes = reference.irg(*logits, *features, *((maps[0], maps[1]) for maps in features))
    return {"vertex": 0.1 * vertices, "edge": 5 * edges, "transformation": 5 * changes}


METHODS = [
    Comparison("sp", sp, {}, ((2, 3, 3),), ((3, 2, 2),)),
    Comparison("sp", sp, {}, ((2, 2, 2),), ((1, 5, 4),)),
    Comparison("cc", cc, {}, **VECTORS),
    Comparison("cc", cc_of_degree_4, {"gamma": 1.5, "order": 4}, **VECTORS),
    Comparison("cc", cc_repdistiller, {"variant": "repdistiller", "embedding": 6}, **VECTORS),
    Comparison("rkd", rkd, {}, **VECTORS),
    Comparison("pkt", pkt, {}, **VECTORS),
    Comparison("pkt", lambda inputs: pkt(inputs, "paper"), {"variant": "paper"}, **VECTORS),
    Comparison("irg", irg, {}, ((2, 4, 4), (4, 2, 2), (4,)), ((3, 5, 5), (3, 2, 2), (3,))),
]
every_method = pytest.mark.parametrize("case", METHODS, ids=str)


@pytest.mark.parametrize("edge", EDGES)
@every_method
def test_values_are_the_references_and_gradients_are_finite(case: Comparison, edge: str) -> None:
    assert_as_the_reference(*at_edge(case, edge))


@every_method
def test_gradients_are_those_of_the_reference(case: Comparison) -> None:
    assert_gradients_are_the_references(case)


@every_method
def test_features_in_half_precision_give_nearly_the_same_and_huge_ones_stay_finite(case: Comparison) -> None:
    assert_half_precision_is_near(case)


@every_method
def test_a_batch_may_be_empty(case: Comparison) -> None:
    assert_a_batch_may_be_empty(case)


@every_method
def test_opposite_samples_and_zeros_give_finite_gradients(case: Comparison) -> None:
    student, teacher = case.answers()
    assert_finite(case, [np.concatenate([x[:1], -x[:1], x[2:] * 0]) for x in student], teacher)


# CRD, whose loss depends on what it remembers.


def nothing_expected(inputs: Inputs) -> Terms:
    raise AssertionError("crd's reference is asked with its memory")


def contrasted(negatives: int) -> Comparison:
    return Comparison("crd", nothing_expected, {"negatives": negatives, "embedding": 8}, **VECTORS)


class Remembering:
    """The reference's memory beside the method's, from the method's first entries on."""

    def __init__(self, method: CRD):
        self.method = method
        self.memory = reference.CrdMemory(method.memory_student.numpy().copy(), method.memory_teacher.numpy().copy())

    def step(self, student_BD: Array, teacher_BD: Array, contrast_BX: Ints, maps: list[Array] | None = None) -> Array:
        """What the reference says of each sample, both directions together; the memory is that after it."""
        ws, bs, wt, bt = [p.detach().numpy() for p in self.method.parameters()] if maps is None else maps
        embedded = reference.crd_embed(student_BD, ws, bs), reference.crd_embed(teacher_BD, wt, bt)
        losses, self.after = reference.crd(*embedded, contrast_BX, self.memory)
        return losses


INDICES = torch.tensor([7, 3, 39, 16, 22])


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("negatives", [6, 50])
def test_crds_losses_and_memory_are_those_of_the_reference_over_three_steps(negatives: int, edge: str) -> None:
    """Of which the second is at the edge and of one class, and the third has one sample twice."""
    about, *odd = at_edge(contrasted(negatives), edge)
    rows = len(odd[0][0])
    method = cast(CRD, about.make())
    case = Remembering(method)
    for step in range(3):
        student, teacher = odd if step == 1 else [[x[:rows] for x in side] for side in about.answers(seed=step)]
        indices = (5 * torch.arange(5) if step == 1 else INDICES)[:rows].clone()
        if step == 2:
            indices[-1] = indices[0]
        contrast = method.entries(indices, indices % 5, step)
        expected = case.step(student[1], teacher[1], contrast.numpy())
        outputs = [ModelOutputs(torch.as_tensor(side[0]), (torch.as_tensor(side[1]),)) for side in (student, teacher)]
        found = method(*outputs, samples(indices % 5, indices_B=indices, epoch=float(step)))
        np.testing.assert_allclose((found["student"] + found["teacher"]).detach().numpy(), expected, rtol=1e-9)
        case.memory = case.after
        np.testing.assert_allclose(method.memory_student.numpy(), case.memory.student_ND, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(method.memory_teacher.numpy(), case.memory.teacher_ND, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(method.normalizers_2.numpy(), [case.memory.student_z, case.memory.teacher_z], rtol=1e-9)


def test_crds_gradients_are_those_of_the_reference() -> None:
    """In the second step: in the first one the normalizer is made, which has no gradient."""
    case = contrasted(6)
    method = cast(CRD, case.make())
    remembering = Remembering(method)
    for step in range(2):
        student, teacher = case.answers(seed=step)
        contrast = method.entries(INDICES, INDICES % 5, step).numpy()
        leaf = torch.as_tensor(student[1]).requires_grad_()
        before = [parameter.detach().numpy().copy() for parameter in method.parameters()]
        outputs = (
            ModelOutputs(torch.as_tensor(student[0]), (leaf,)),
            ModelOutputs(torch.as_tensor(teacher[0]), (torch.as_tensor(teacher[1]),)),
        )
        found = method(*outputs, samples(INDICES % 5, indices_B=INDICES, epoch=float(step)))
        if step == 0:
            remembering.step(student[1], teacher[1], contrast)
            remembering.memory = remembering.after
    gradients = torch.autograd.grad((found["student"] + found["teacher"]).mean(), [leaf, *method.parameters()])
    expected = derivatives(
        lambda own, *maps: float(remembering.step(own, teacher[1], contrast, list(maps)).mean()), [student[1], *before]
    )
    for analytic, numeric in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(analytic.numpy(), numeric, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("edge", EDGES)
def test_crds_losses_and_gradients_are_finite(edge: str) -> None:
    assert_finite(*at_edge(contrasted(6), edge))


def test_crds_features_in_half_precision_give_nearly_the_same_and_huge_ones_stay_finite() -> None:
    assert_half_precision_is_near(contrasted(6))


def test_crds_batch_may_be_empty() -> None:
    assert_a_batch_may_be_empty(contrasted(6))
