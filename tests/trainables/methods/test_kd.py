"""kd: what is beside its formula, with which `test_logits_against_references.py` compares it."""

import torch

from tests.trainables.methods.split import draw
from trainables.methods.kd import soft_loss


def test_equal_logits_lose_nothing_at_all() -> None:
    for logits in (draw(4, 9, seed=0), draw(4, 9, seed=0).float(), torch.zeros(4, 9), 1e4 * draw(4, 9, seed=1)):
        student = logits.clone().requires_grad_()
        loss = soft_loss(student, logits, 4.0)
        assert loss.count_nonzero() == 0
        loss.sum().backward()
        assert student.grad is not None
        assert student.grad.abs().max() < 1e-5


def test_a_teacher_that_is_sure_of_what_the_student_rules_out_has_an_exact_loss() -> None:
    """All of its mass lies where the student puts e^-20000 of its own."""
    opposite = soft_loss(torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([[-1e4, 1e4, 0.0]]), 1.0)
    torch.testing.assert_close(opposite, torch.tensor([2e4]))


def test_half_precision_logits_are_reduced_in_float32_under_autocast_too_and_float64_stays() -> None:
    student, teacher = draw(4, 9, seed=0), draw(4, 9, seed=1)
    for dtype in (torch.bfloat16, torch.float16):
        expected = soft_loss(student.to(dtype).double(), teacher.to(dtype).double(), 4.0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = soft_loss(student.to(dtype), teacher.to(dtype), 4.0)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert soft_loss(student, teacher, 4.0).dtype == soft_loss(student, teacher.float(), 4.0).dtype == torch.float64


def test_a_teacher_under_inference_mode_can_be_learned_from() -> None:
    student = draw(2, 3, seed=0).requires_grad_()
    with torch.inference_mode():
        teacher = draw(2, 3, seed=1) * 1
    soft_loss(student, teacher, 1.0).sum().backward()
    assert student.grad is not None
