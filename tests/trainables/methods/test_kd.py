import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from trainables.methods.kd import soft_loss


def reference(student: list[float], teacher: list[float], temperature: float) -> float:
    """T²·Σ p·log(p/q) of one sample, term by term in Python's float64."""

    def softmax(logits: list[float]) -> list[float]:
        exponentials = [math.exp((z - max(logits)) / temperature) for z in logits]
        return [e / math.fsum(exponentials) for e in exponentials]

    q, p = softmax(student), softmax(teacher)
    return temperature**2 * math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def numeric_gradient(function: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        moved = np.zeros_like(x)
        moved[index] = step
        gradient[index] = (function(x + moved) - function(x - moved)) / (2 * step)
    return gradient


def draw(*shape: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("num_samples", [1, 6])
def test_each_samples_loss_is_t_squared_kl(temperature: float, num_samples: int) -> None:
    student, teacher = draw(num_samples, 7, seed=0), draw(num_samples, 7, seed=1)
    expected = [reference(s, t, temperature) for s, t in zip(student.tolist(), teacher.tolist(), strict=True)]
    np.testing.assert_allclose(soft_loss(student, teacher, temperature).numpy(), expected, rtol=1e-12)


def test_the_gradient_is_t_times_the_difference_of_softmaxes_and_that_of_finite_differences() -> None:
    student, teacher = draw(3, 5, seed=0).requires_grad_(), draw(3, 5, seed=1)
    (gradient,) = torch.autograd.grad(soft_loss(student, teacher, 4.0).sum(), student)
    closed = 4.0 * ((student / 4).softmax(1) - (teacher / 4).softmax(1))
    torch.testing.assert_close(gradient, closed.detach(), rtol=1e-12, atol=1e-14)

    def total(x: np.ndarray) -> float:
        return math.fsum(reference(s, t, 4.0) for s, t in zip(x.tolist(), teacher.tolist(), strict=True))

    np.testing.assert_allclose(gradient.numpy(), numeric_gradient(total, student.detach().numpy()), rtol=1e-7, atol=1e-9)


def test_an_empty_batch_has_no_losses_and_a_gradient_of_its_shape() -> None:
    student = torch.zeros(0, 5, requires_grad=True)
    loss = soft_loss(student, torch.zeros(0, 5), 4.0)
    assert loss.shape == (0,)
    loss.sum().backward()
    assert student.grad is not None
    assert student.grad.shape == (0, 5)


def test_equal_logits_lose_nothing() -> None:
    for logits in (draw(4, 9, seed=0), draw(4, 9, seed=0).float(), torch.zeros(4, 9), 1e4 * draw(4, 9, seed=1)):
        student = logits.clone().requires_grad_()
        loss = soft_loss(student, logits, 4.0)
        assert loss.count_nonzero() == 0
        loss.sum().backward()
        assert student.grad is not None
        assert student.grad.abs().max() < 1e-5


def test_huge_logits_and_a_dominating_class_stay_finite() -> None:
    rows = [[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [0.0, 0.0, 0.0], [80.0, 0.0, 0.0]]
    for dtype in (torch.float32, torch.float64):
        for s in rows:
            for t in rows:
                student = torch.tensor([s], dtype=dtype, requires_grad=True)
                loss = soft_loss(student, torch.tensor([t], dtype=dtype), 1.0)
                loss.sum().backward()
                assert loss.isfinite().all()
                assert student.grad is not None
                assert student.grad.isfinite().all()
                assert s != t or loss.item() == 0
    # All the teacher's mass where the student puts e^-20000 of its own.
    opposite = soft_loss(torch.tensor([rows[0]]), torch.tensor([rows[1]]), 1.0)
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
