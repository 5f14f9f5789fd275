"""dkd: what is beside its formula, with which `test_logits_against_references.py` compares it."""

import math

import pytest
import torch

from tests.trainables.methods.calls import make
from tests.trainables.methods.split import draw
from trainables.errors import ExperimentError
from trainables.methods.dkd import dkd_terms
from trainables.methods.kd import soft_loss

LABELS = torch.tensor([0, 4, 2, 4, 1])


def test_weighed_by_what_the_teacher_leaves_to_the_others_it_is_kd() -> None:
    """Equation 7: KD = TCKD + (1 - p_target of the teacher)·NCKD."""
    student, teacher = draw(5, 5, seed=0), draw(5, 5, seed=1)
    terms = dkd_terms(student, teacher, LABELS, 4.0, alpha=1.0, beta=1.0)
    left = 1 - (teacher / 4).softmax(1)[torch.arange(5), LABELS]
    torch.testing.assert_close(terms["tckd"] + left * terms["nckd"], soft_loss(student, teacher, 4.0), rtol=1e-11, atol=1e-13)


def test_equal_logits_lose_nothing_at_all() -> None:
    for logits in (draw(5, 5, seed=0), draw(5, 5, seed=0).float(), torch.zeros(5, 5), 1e4 * draw(5, 5, seed=1)):
        terms = dkd_terms(logits.clone(), logits, LABELS, 4.0)
        assert terms["tckd"].count_nonzero() == terms["nckd"].count_nonzero() == 0


def test_a_teacher_that_is_sure_still_teaches_how_the_others_compare() -> None:
    """1 - p_target is 0 in float32 here; the others' distribution must not be lost with it."""
    student, teacher = torch.tensor([[200.0, 0.0, 0.0]]), torch.tensor([[200.0, 2.0, 0.0]])
    nckd = dkd_terms(student, teacher, torch.tensor([0]), 1.0, beta=1.0)["nckd"]
    p = 1 / (1 + math.exp(-2))
    torch.testing.assert_close(nckd, torch.tensor([p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))]), rtol=1e-5, atol=1e-7)


def test_one_class_alone_is_refused() -> None:
    with pytest.raises(ExperimentError, match="dkd compares a sample's class with the others, but the data has only one"):
        make("dkd", num_classes=1)
    make("dkd", num_classes=2)
