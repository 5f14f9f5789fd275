"""Rows hold what they declare; logits in half precision: how far the loss from them may be off, in float64 from the definitions.

How far T²·KL(teacher ‖ student) may be off: let r be the largest difference of two logits of the student, p =
softmax(z/T), d_j = max z - z_j, and h(x) = -x·log x - (1 - x)·log(1 - x).

- Rounding, to first order: T·2⁻¹¹·Σ_j p_j·d_j·|g_j - Σ_i p_i·g_i|, where g = log p - log softmax(student/T).
- The largest k alone: T²·(δ·log(K - 1) + h(δ) + δ·r/T), with δ ≤ 1 - 1/K. Where T ≥ 1, δ is what the rest, as it is stored,
  weighs at T: x^(1/T) is concave, so that it weighs less as it was (Jensen). Where T < 1, δ = R/(R + Σ_stored e^(z_j/T)) with
  R = e^(z_k·(1/T - 1))·Σ_rest e^(z_j), since no logit of the rest is above z_k. No set of classes gains more than δ (total
  variation); the first two terms bound what that does to the entropy (Zhang 2007, "Estimating mutual information via
  Kolmogorov distance", theorem 6; Audenaert 2007), the last what it does to the cross-entropy.

Shapes: B samples, K classes, k stored ones.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trainables.methods.contract import ModelOutputs
from trainables.teachers.rows import RowFormat

ROUNDING = 2.0**-11
"""The relative error of a number in half precision."""


def logits(seed: int, rows: int, classes: int, scale: float) -> Tensor:
    return scale * torch.randn(rows, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """T²·KL(softmax(teacher/T) ‖ softmax(student/T)), (B,)."""
    p_BK, q_BK = (x / temperature for x in (teacher_BK, student_BK))
    return temperature**2 * (p_BK.softmax(1) * (p_BK.log_softmax(1) - q_BK.log_softmax(1))).sum(1)


def round_trip(stored: RowFormat, teacher_BK: Tensor) -> Tensor:
    return stored.decode(stored.encode(ModelOutputs(teacher_BK)), torch.float64).logits_BK


def rounding_bound(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """The module docstring's first item, (B,)."""
    log_p_BK = (teacher_BK / temperature).log_softmax(1)
    p_BK, below_BK = log_p_BK.exp(), teacher_BK.amax(1, keepdim=True) - teacher_BK
    gap_BK = log_p_BK - (student_BK / temperature).log_softmax(1)
    return temperature * ROUNDING * (p_BK * below_BK * (gap_BK - (p_BK * gap_BK).sum(1, keepdim=True)).abs()).sum(1)


def tail_bound(stored: RowFormat, student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """The module docstring's second item, (B,)."""
    classes, num_stored = stored.num_classes, stored.top_k or stored.num_classes
    largest_Bk, classes_Bk = teacher_BK.topk(num_stored, dim=1)
    others_BK = teacher_BK.scatter(1, classes_Bk, -math.inf)
    total_B, smallest_B = others_BK.logsumexp(1), largest_Bk[:, -1]
    if temperature >= 1:
        even_B = (total_B - math.log(classes - num_stored)) / temperature
        rest_B = even_B.exp() * (classes - num_stored)
    else:
        rest_B = (smallest_B * (1 / temperature - 1) + total_B).exp()
    share_B = (rest_B / (rest_B + (largest_Bk / temperature).exp().sum(1))).clamp(max=1 - 1 / classes)
    entropy_B = -torch.xlogy(share_B, share_B) - torch.xlogy(1 - share_B, 1 - share_B)
    spread_B = student_BK.amax(1) - student_BK.amin(1)
    return temperature**2 * (share_B * math.log(classes - 1) + entropy_B + share_B * spread_B / temperature)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_all_logits_give_the_loss_within_a_rounding(classes: int, scale: float, temperature: float) -> None:
    student, teacher = logits(1, 64, classes, scale), logits(2, 64, classes, scale)
    off = (loss(student, round_trip(RowFormat(classes), teacher), temperature) - loss(student, teacher, temperature)).abs()
    assert (off <= 1.05 * rounding_bound(student, teacher, temperature) + 1e-6).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
@pytest.mark.parametrize(("classes", "top_k"), [(3, 1), (10, 9), (10, 4), (1000, 20), (1000, 1)])
def test_the_largest_logits_give_the_loss_within_the_bound(classes: int, top_k: int, scale: float, temperature: float) -> None:
    student, teacher = logits(1, 64, classes, scale), logits(2, 64, classes, scale)
    stored = RowFormat(classes, top_k)
    off = (loss(student, round_trip(stored, teacher), temperature) - loss(student, teacher, temperature)).abs()
    allowed = tail_bound(stored, student, teacher, temperature) + rounding_bound(
        student, round_trip(stored, teacher), temperature
    )
    assert (off <= 1.05 * allowed + 1e-6).all()


def test_the_bound_of_a_sure_teacher_is_small() -> None:
    student, teacher = logits(1, 64, 1000, 2.0), logits(2, 64, 1000, 1.0)
    teacher[torch.arange(64), torch.arange(64)] += 20
    assert (tail_bound(RowFormat(1000, 10), student, teacher, 1.0) < 1e-3).all()


def test_the_rest_has_its_probability_spread_evenly() -> None:
    teacher = logits(3, 8, 50, 2.0)
    stored = RowFormat(50, 5)
    p, q = (x.softmax(1) for x in (teacher, round_trip(stored, teacher)))
    top_classes = teacher.topk(5, dim=1).indices
    assert torch.allclose(p.gather(1, top_classes), q.gather(1, top_classes), rtol=2e-3)
    rest = q.scatter(1, top_classes, 0.0)
    assert torch.allclose(rest.sum(1), p.scatter(1, top_classes, 0.0).sum(1), rtol=5e-3)
    assert torch.allclose(rest.amax(1), rest.sum(1) / 45, rtol=1e-9)


def test_the_largest_logit_is_stored_in_single_precision_and_huge_ones_stay_finite() -> None:
    teacher = torch.tensor([[123456.7, -1e6, 123450.0], [-math.inf, 2.0, 1.0]], dtype=torch.float64)
    for stored in (RowFormat(3), RowFormat(3, 2)):
        found = round_trip(stored, teacher)
        assert found.isfinite().all()
        assert found.amax(1).tolist() == pytest.approx([123456.7, 2.0], rel=1e-7)


def test_a_batch_without_samples_has_columns_without_rows() -> None:
    for stored in (RowFormat(5), RowFormat(5, 2)):
        assert round_trip(stored, torch.zeros(0, 5)).shape == (0, 5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [7, 1, 0])
@pytest.mark.parametrize(
    "row_format", [RowFormat(101), RowFormat(1000, 21), RowFormat(40_000, 21), RowFormat(7, exact_logits="float64")], ids=str
)
def test_rows_hold_the_declared_columns_to_the_bit(row_format: RowFormat, rows: int, device: str) -> None:
    columns = row_format.encode(ModelOutputs(logits(1, rows, row_format.num_classes, 1.0).to(device)))
    found = {name: (str(each.cpu().numpy().dtype), each.shape[1:]) for name, each in columns.items()}
    assert found == row_format.columns
    rows_B = row_format.to_host(np.arange(rows), columns)()
    assert rows_B["sample"].tolist() == list(range(rows))
    back = row_format.to_device(rows_B, torch.device(device))
    assert all(torch.equal(back[name], columns[name]) for name in columns)


def test_features_in_fp8_are_the_nearest_numbers_of_that_format_times_their_largest_magnitude() -> None:
    stored = RowFormat(taps=(("embedding", (50,)), ("map", (6, 2, 3))), feature_dtype="fp8")
    generator = torch.Generator().manual_seed(4)
    magnitudes_B = torch.logspace(-3, 6, 5)
    embedding_BD = torch.randn(5, 50, generator=generator) * magnitudes_B.view(-1, 1)
    map_BDHW = torch.randn(5, 6, 2, 3, generator=generator) * magnitudes_B.view(-1, 1, 1, 1)
    embedding_BD[0] = 0
    embedding_BD[1] *= torch.logspace(-5, 0, 50)
    outputs = ModelOutputs(None, (embedding_BD, map_BDHW))
    found = stored.decode(stored.encode(outputs), torch.float64).features
    # 4 bits of exponent with bias 7, 3 of mantissa; both all ones are no number (Micikevicius et al. 2022, table 1)
    table = [2.0**-6 * m / 8 for m in range(8)] + [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8)][:-1]
    grid = torch.tensor([-each for each in table] + table, dtype=torch.float64)
    for values, read in zip((embedding_BD, map_BDHW), found, strict=True):
        scale = values.double().flatten(1).abs().amax(1).view(-1, *[1] * (values.ndim - 1)) / 448
        units = values.double() / torch.where(scale > 0, scale, 1)
        nearest = (units[..., None] - grid).abs().amin(-1)
        assert torch.allclose((read - values).abs(), nearest * scale, rtol=1e-3, atol=1e-5 * scale.max().item())
    assert str(stored) == "embedding 50 + map 6×2×3"
    assert stored.row.itemsize == 4 + 50 + 4 + 36 + 4
    x, y = embedding_BD.double().flatten(), found[0].flatten()
    error_pct, cosine = 100 * (x - y).norm() / x.norm(), x @ y / (x.norm() * y.norm())
    assert f"embedding by {error_pct:.2g}% (cosine {cosine:.5f})" in stored.describe_error(
        ModelOutputs(None, (embedding_BD, map_BDHW))
    )
