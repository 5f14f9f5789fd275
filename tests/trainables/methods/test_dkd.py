import math

import numpy as np
import pytest
import torch

from trainables.methods.dkd import dkd_terms
from trainables.methods.kd import soft_loss


def reference(student: list[float], teacher: list[float], label: int, temperature: float) -> tuple[float, float]:
    """(TCKD, NCKD) of one sample, unweighted, from equations 4 to 6 of the paper, term by term in float64."""

    def exponentials(logits: list[float]) -> list[float]:
        return [math.exp((z - max(logits)) / temperature) for z in logits]

    def kl(p: list[float], q: list[float]) -> float:
        return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    def target_and_rest(e: list[float]) -> list[float]:
        return [e[label] / math.fsum(e), math.fsum(x for k, x in enumerate(e) if k != label) / math.fsum(e)]

    def among_others(e: list[float]) -> list[float]:
        rest = [x for k, x in enumerate(e) if k != label]
        return [x / math.fsum(rest) for x in rest]

    s, t = exponentials(student), exponentials(teacher)
    return kl(target_and_rest(t), target_and_rest(s)), kl(among_others(t), among_others(s))


def draw(*shape: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 4, 2, 4, 1])


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_each_samples_terms_are_those_of_the_paper(temperature: float, num_samples: int) -> None:
    student, teacher, labels = draw(num_samples, 5, seed=0), draw(num_samples, 5, seed=1), LABELS[:num_samples]
    rows = zip(student.tolist(), teacher.tolist(), labels.tolist(), strict=True)
    expected = np.array([reference(s, t, label, temperature) for s, t, label in rows])
    terms = dkd_terms(student, teacher, labels, temperature)
    np.testing.assert_allclose(terms["tckd"].numpy(), temperature**2 * expected[:, 0], rtol=1e-11)
    np.testing.assert_allclose(terms["nckd"].numpy(), temperature**2 * 8 * expected[:, 1], rtol=1e-11)
    weighed = dkd_terms(student, teacher, labels, temperature, alpha=3.0, beta=0.5)
    np.testing.assert_allclose(weighed["tckd"].numpy(), temperature**2 * 3 * expected[:, 0], rtol=1e-11)
    np.testing.assert_allclose(weighed["nckd"].numpy(), temperature**2 * 0.5 * expected[:, 1], rtol=1e-11)


def test_weighed_by_what_the_teacher_leaves_to_the_others_it_is_kd() -> None:
    """Equation 7: KD = TCKD + (1 - p_target of the teacher)·NCKD."""
    student, teacher = draw(5, 5, seed=0), draw(5, 5, seed=1)
    terms = dkd_terms(student, teacher, LABELS, 4.0, alpha=1.0, beta=1.0)
    left = 1 - (teacher / 4).softmax(1)[torch.arange(5), LABELS]
    torch.testing.assert_close(terms["tckd"] + left * terms["nckd"], soft_loss(student, teacher, 4.0), rtol=1e-11, atol=1e-13)


def test_the_gradient_is_that_of_finite_differences_of_the_reference() -> None:
    student, teacher = draw(5, 5, seed=0).requires_grad_(), draw(5, 5, seed=1)
    terms = dkd_terms(student, teacher, LABELS, 4.0)
    (gradient,) = torch.autograd.grad((terms["tckd"] + terms["nckd"]).sum(), student)
    for row in range(5):
        for column in range(5):
            sides = []
            for step in (1e-5, -1e-5):
                moved = student[row].tolist()
                moved[column] += step
                tckd, nckd = reference(moved, teacher[row].tolist(), int(LABELS[row]), 4.0)
                sides.append(16 * (tckd + 8 * nckd))
            assert gradient[row, column].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-6, abs=1e-8)


def test_an_empty_batch_has_no_losses() -> None:
    student = torch.zeros(0, 5, requires_grad=True)
    terms = dkd_terms(student, torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 4.0)
    assert {name: term.shape for name, term in terms.items()} == {"tckd": (0,), "nckd": (0,)}
    (terms["tckd"] + terms["nckd"]).sum().backward()
    assert student.grad is not None
    assert student.grad.shape == (0, 5)


def test_equal_logits_lose_nothing() -> None:
    for logits in (draw(5, 5, seed=0), draw(5, 5, seed=0).float(), torch.zeros(5, 5), 1e4 * draw(5, 5, seed=1)):
        terms = dkd_terms(logits.clone(), logits, LABELS, 4.0)
        assert terms["tckd"].count_nonzero() == terms["nckd"].count_nonzero() == 0


def test_huge_logits_and_a_dominating_class_stay_finite() -> None:
    rows = [[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [0.0, 0.0, 0.0], [200.0, 0.0, 1.0], [-200.0, 0.0, 1.0]]
    for dtype in (torch.float32, torch.float64):
        for s in rows:
            for t in rows:
                for label in range(3):
                    student = torch.tensor([s], dtype=dtype, requires_grad=True)
                    terms = dkd_terms(student, torch.tensor([t], dtype=dtype), torch.tensor([label]), 4.0)
                    loss = terms["tckd"] + terms["nckd"]
                    loss.sum().backward()
                    assert loss.isfinite().all()
                    assert student.grad is not None
                    assert student.grad.isfinite().all()


def test_a_teacher_that_is_sure_still_teaches_how_the_others_compare() -> None:
    """1 - p_target is 0 in float32 here; the others' distribution must not be lost with it."""
    student, teacher = torch.tensor([[200.0, 0.0, 0.0]]), torch.tensor([[200.0, 2.0, 0.0]])
    nckd = dkd_terms(student, teacher, torch.tensor([0]), 1.0, beta=1.0)["nckd"]
    p = 1 / (1 + math.exp(-2))
    torch.testing.assert_close(nckd, torch.tensor([p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))]), rtol=1e-5, atol=1e-7)


def test_two_classes_leave_one_other_and_no_nckd() -> None:
    terms = dkd_terms(draw(4, 2, seed=0), draw(4, 2, seed=1), torch.tensor([0, 1, 1, 0]), 2.0)
    assert terms["nckd"].count_nonzero() == 0
    assert bool((terms["tckd"] > 0).all())
