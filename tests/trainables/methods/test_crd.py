"""CRD's draw of negatives and its memory."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.trainables.methods.calls import samples
from tests.trainables.methods.split import Case, answers
from trainables.errors import ExperimentError
from trainables.methods.contract import MethodBatch, ModelOutputs
from trainables.methods.crd import CRD

CASE = Case("crd", {"negatives": 6, "embedding": 3}, ((4,),), ((6,),))
INDICES = torch.tensor([7, 3, 39, 16])


def build(**more: Any) -> CRD:
    return cast(CRD, CASE.make(**more))


def batch(indices: Tensor = INDICES, epoch: float = 0.0) -> MethodBatch:
    return samples(indices % 5, indices_B=indices, epoch=epoch)


def test_negatives_are_of_other_classes_without_repeats_and_the_own_entry_comes_first() -> None:
    labels = torch.tensor([0, 2, 2, 1, 0, 2, 2, 2, 1, 2, 0, 2])
    method = build(labels_M=labels, num_classes=3, seed=5)
    indices = torch.arange(12)
    for epoch in range(20):
        entries = method.entries(indices, labels, epoch)
        assert entries.shape == (12, 7)
        assert entries[:, 0].tolist() == indices.tolist()
        for index, row in enumerate(entries[:, 1:].tolist()):
            others = [other for other in range(12) if labels[other] != labels[index]]
            assert set(row) <= set(others)
            counts = [row.count(other) for other in others]
            assert max(counts) - min(counts) <= 1  # class 2 has five others for six negatives


def test_each_sample_of_another_class_is_drawn_as_often_as_any_other() -> None:
    method = build(seed=1)
    draws = torch.cat([method.entries(torch.tensor([4]), torch.tensor([4]), epoch)[:, 1:] for epoch in range(1000)])
    counts = torch.bincount(draws.flatten(), minlength=40)
    assert counts[torch.arange(40) % 5 == 4].sum() == 0
    expected = 1000 * 6 / 32
    assert ((counts[torch.arange(40) % 5 != 4] - expected).abs() < 5 * math.sqrt(expected)).all()


def test_the_draw_depends_on_seed_epoch_and_sample_alone() -> None:
    method = build(seed=3)
    whole = method.entries(INDICES, INDICES % 5, 2)
    assert method.entries(INDICES.flip(0), INDICES.flip(0) % 5, 2).flip(0).equal(whole)
    assert method.entries(INDICES[:1], INDICES[:1] % 5, 2).equal(whole[:1])
    assert not method.entries(INDICES, INDICES % 5, 3).equal(whole)
    assert not build(seed=4).entries(INDICES, INDICES % 5, 2).equal(whole)


def test_the_gradient_is_that_of_the_memory_before_the_step() -> None:
    method = build()
    student, teacher = answers(CASE, 4)
    method(student, teacher, batch())  # sets Z
    gradients = []
    for training in (False, True):
        method.train(training)
        found = method(student, teacher, batch())
        wanted = [student.features[0], *method.parameters()]
        gradients.append(torch.autograd.grad(found["student"].sum() + found["teacher"].sum(), wanted))
    for still, moved in zip(*gradients, strict=True):
        assert still.equal(moved)
        assert still.count_nonzero()


def test_of_equal_indices_in_a_batch_the_last_is_kept() -> None:
    twice = torch.tensor([7, 3, 7, 16])
    method, other = build(), build()
    student, teacher = answers(CASE, 4)
    method(student, teacher, batch(twice))
    last = [ModelOutputs(outputs.logits_BK[1:], (outputs.features[0][1:],)) for outputs in (student, teacher)]
    other(*last, batch(twice[1:]))
    # A product of matrices rounds by its number of rows.
    torch.testing.assert_close(method.memory_student, other.memory_student, rtol=0, atol=1e-14)
    torch.testing.assert_close(method.memory_teacher, other.memory_teacher, rtol=0, atol=1e-14)


def test_outside_training_nothing_is_remembered() -> None:
    method = build().eval()
    before = [buffer.clone() for buffer in method.buffers()]
    found = method(*answers(CASE, 4), batch())
    assert all(term.isfinite().all() for term in found.values())
    assert all(was.equal(buffer) for was, buffer in zip(before, method.buffers(), strict=True))


def test_a_resumed_job_says_what_an_unbroken_one_does() -> None:
    unbroken, broken = build(), build()
    for step in range(2):
        for method in (unbroken, broken):
            method(*answers(CASE, 4, seed=step), batch(INDICES - step, epoch=0.25 * step))
    resumed = build(seed=0)
    with torch.no_grad():
        for tensor in (*resumed.parameters(), resumed.memory_student, resumed.memory_teacher):
            tensor.zero_()
    resumed.load_state_dict(broken.state_dict())
    assert set(broken.state_dict()) >= {"memory_student", "memory_teacher", "normalizers_2"}
    one, two = (method(*answers(CASE, 4, seed=2), batch(epoch=0.5)) for method in (unbroken, resumed))
    assert all(one[name].equal(two[name]) for name in one)
    assert unbroken.memory_student.equal(resumed.memory_student)


def test_one_class_alone_has_no_negatives_and_is_refused() -> None:
    with pytest.raises(ExperimentError, match="crd compares samples of different classes"):
        build(labels_M=torch.full((12,), 3))
