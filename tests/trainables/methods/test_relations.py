"""SP, CC, RKD, PKT, IRG and CRD, against sums written out and at the edges of what they may be given."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainables.methods.calls import make, samples
from tests.trainables.methods.split import Case, answers, assert_ranks_equal_one, leaves
from trainables.errors import ExperimentError
from trainables.methods.contract import Method, Seen
from trainables.methods.rkd import angles_apart
from trainables.rank_pool import Ranks

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
    Case("rkd", {"variant": "paper"}, **ROWS),
    Case("pkt", **ROWS),
    Case("pkt", {"variant": "paper"}, **ROWS),
    Case("irg", **GRAPH),
    Case("crd", {"negatives": 6, "embedding": 3}, **ROWS, steps=3),
    Case("crd", {"negatives": 50, "embedding": 3}, **ROWS),
]


def batch_mean(method: Method, student: Seen, teacher: Seen, labels: Tensor | None = None, **batch: Any) -> Tensor:
    rows = len(student.logits_BK)
    labels = torch.arange(rows) % 5 if labels is None else labels
    found: dict[str, Tensor] = method(student, teacher, samples(labels, **batch))
    assert tuple(found) == method.terms
    assert all(term.shape in ((rows,), ()) for term in found.values())
    return torch.stack([term.sum() / max(len(term), 1) if term.ndim else term for term in found.values()]).sum()


def both(case: Case, rows: int = 4) -> tuple[Method, Seen, Seen, list[np.ndarray], list[np.ndarray]]:
    """The method, what it is given, and its features as numpy's, flattened."""
    student, teacher = answers(case, rows)
    flat = [[feature.detach().flatten(1).numpy() for feature in seen.features] for seen in (student, teacher)]
    return case.make(), student, teacher, *flat


def test_sp_compares_normalised_similarities() -> None:
    method, student, teacher, (s,), (t,) = both(CASES[0])

    def rows(x: np.ndarray) -> np.ndarray:
        return np.array([[a @ b for b in x] / np.linalg.norm([a @ b for b in x]) for a in x])

    expected = sum((rows(s)[i, j] - rows(t)[i, j]) ** 2 for i in range(4) for j in range(4)) / 16
    assert batch_mean(method, student, teacher).item() == pytest.approx(expected, rel=1e-11)


def test_cc_compares_the_taylor_series_of_a_gaussian_kernel_of_all_pairs() -> None:
    method, student, teacher, (s,), (t,) = both(CASES[1])

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        return math.exp(-0.8) * sum(0.8**p / math.factorial(p) * cosine**p for p in range(3))

    apart = [(kernel(s[i], s[j]) - kernel(t[i], t[j])) ** 2 for i, j in itertools.product(range(4), repeat=2)]
    assert batch_mean(method, student, teacher).item() == pytest.approx(math.fsum(apart) / 16, rel=1e-10)
    near_NN = Case("cc", {"order": 20}, **ROWS).make()._kernel(torch.tensor([[1.0, 0.0], [0.6, 0.8]]).double())  # type: ignore[operator]
    assert near_NN[0, 1].item() == pytest.approx(math.exp(-0.4 * (0.4**2 + 0.8**2)), rel=1e-7)  # of the distance of directions


def test_repdistillers_cc_multiplies_embedded_differences_of_neighbours() -> None:
    method, student, teacher, (s,), (t,) = both(CASES[2])
    ws, bs, wt, bt = (parameter.detach().numpy() for parameter in method.parameters())
    delta = np.abs((s @ ws.T + bs) - (t @ wt.T + bt))
    assert batch_mean(method, student, teacher).item() == pytest.approx(sum(delta[i] @ delta[i + 1] for i in range(3)) / 3)


def test_cc_has_for_each_variant_the_weight_of_its_source() -> None:
    options = type(make("cc", **ROWS)).Options.model_validate
    given = {"variant": "repdistiller"}
    assert [options(o).weight for o in ({}, given, {**given, "weight": 1.0})] == [100.0, 0.02, 1.0]


def huber(x: float) -> float:
    return x * x / 2 if abs(x) < 1 else abs(x) - 0.5


@pytest.mark.parametrize("variant", ["paper", "repdistiller"])
def test_rkd_compares_distances_by_their_mean_and_angles(variant: str) -> None:
    rows = 5
    method, student, teacher, (s,), (t,) = both(Case("rkd", {"variant": variant}, **ROWS), rows)

    def distances(x: np.ndarray) -> dict[tuple[int, int], float]:
        found = {(i, j): float(np.linalg.norm(x[i] - x[j])) for i, j in itertools.permutations(range(rows), 2)}
        return {pair: d / (sum(found.values()) / len(found)) for pair, d in found.items()}

    def angle(x: np.ndarray, i: int, j: int, k: int) -> float:
        a, b = x[j] - x[i], x[k] - x[i]
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    ds, dt = distances(s), distances(t)
    pairs = math.fsum(huber(ds[pair] - dt[pair]) for pair in ds)
    triples = math.fsum(huber(angle(s, *ijk) - angle(t, *ijk)) for ijk in itertools.permutations(range(rows), 3))
    over = (20, 60) if variant == "paper" else (25, 125)
    expected = 25 * pairs / over[0] + 50 * triples / over[1]
    assert batch_mean(method, student, teacher).item() == pytest.approx(expected, rel=1e-10)


def test_rkds_angles_in_parts_are_those_of_the_whole() -> None:
    student, teacher = (seen.features[0] for seen in answers(Case("rkd", **ROWS), 7))
    losses = [angles_apart(student, teacher, part=part) for part in (1, 2 * 7 * 13, 10**6)]
    gradients = [torch.autograd.grad(loss, student)[0] for loss in losses]
    for loss, gradient in zip(losses[:2], gradients[:2], strict=True):
        torch.testing.assert_close(loss, losses[2], rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, gradients[2], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", ["paper", "repdistiller"])
def test_pkt_compares_the_probabilities_of_neighbours(variant: str) -> None:
    method, student, teacher, (s,), (t,) = both(Case("pkt", {"variant": variant}, **ROWS))
    own, eps = (True, 1e-7) if variant == "repdistiller" else (False, 0.0)

    def probabilities(x: np.ndarray) -> np.ndarray:
        norms = [np.linalg.norm(a) + eps for a in x]
        k = [[(x[i] @ x[j] / norms[i] / norms[j] + 1) / 2 * (own or i != j) for j in range(4)] for i in range(4)]
        return np.array([np.array(row) / sum(row) for row in k])

    p, q = probabilities(t), probabilities(s)
    terms = [p[i, j] * math.log((p[i, j] + eps) / (q[i, j] + eps)) for i in range(4) for j in range(4) if own or i != j]
    expected = math.fsum(terms) / (16 if own else 1)
    assert batch_mean(method, student, teacher).item() == pytest.approx(expected, rel=1e-9)


def test_irg_compares_vertices_edges_and_what_becomes_of_a_map() -> None:
    method, student, teacher, s, t = both(CASES[7])
    logits = student.logits_BK.detach().numpy(), teacher.logits_BK.numpy()

    def edges(x: np.ndarray) -> np.ndarray:
        squares = np.array([[np.sum((a - b) ** 2) for b in x] for a in x])
        return squares / squares.max()

    s1, s2 = (feature.detach().numpy() for feature in student.features[:2])
    t1, t2 = (feature.numpy() for feature in teacher.features[:2])
    pooled_s = s1.reshape(4, 2, 2, 2, 2, 2).mean((3, 5))
    pooled_t = np.stack([t1[:, :, a : a + 3, b : b + 3].mean((2, 3)) for a in (0, 2) for b in (0, 2)], -1).reshape(4, 3, 2, 2)
    paired_s = (s2[:, 0::2] + s2[:, 1::2]) / 2
    moved = [np.sum((a - b) ** 2, axis=(1, 2, 3)) for a, b in ((pooled_s, paired_s), (pooled_t, t2))]
    change = np.mean((moved[0] / moved[0].max() - moved[1] / moved[1].max()) ** 2)
    edge = np.mean([np.mean((edges(a) - edges(b)) ** 2) for a, b in zip(s, t, strict=True)])
    expected = 0.1 * np.mean((logits[0] - logits[1]) ** 2) + 5 * edge + 5 * change
    assert batch_mean(method, student, teacher).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("name", "student_shapes", "says"),
    [
        (
            "irg",
            ((2, 4, 4), (3, 2, 2), (4,)),
            "distill.options.irg.student_taps: the second map, (3, 2, 2), needs as many channels",
        ),
        ("irg", ((2, 4, 4), (2, 8, 8), (4,)), "no larger a size"),
        ("irg", ((2, 4, 4), (4,)), "the first two have to be maps (C, H, W)"),
        ("irg", ((2, 4, 4), (2, 4, 4)), "name equally many"),
        ("sp", ((2, 4, 4), (2, 4, 4)), "distill.options.sp.student_taps: sp compares one feature, not 2"),
        ("crd", (), "crd compares one feature, not 0"),
    ],
)
def test_features_that_do_not_fit_are_refused_in_one_line(name: str, student_shapes: Any, says: str) -> None:
    teacher_shapes = GRAPH["teacher_shapes"] if name == "irg" else ((4,),)
    with pytest.raises(ExperimentError) as caught:
        make(name, student_shapes=student_shapes, teacher_shapes=teacher_shapes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "crd"], ids=str)
def test_the_gradient_is_that_of_finite_differences(case: Case) -> None:
    method = case.make()
    student, teacher = answers(case, 4)

    def loss(logits: Tensor, *features: Tensor) -> Tensor:
        return batch_mean(method, Seen(logits, features), teacher)

    assert torch.autograd.gradcheck(loss, tuple(leaves(student)))


EDGES: dict[str, tuple[Any, Any]] = {
    "random": (lambda x: x, lambda x: x),
    "a student of zeros": (lambda x: x * 0, lambda x: x),
    "a teacher of zeros": (lambda x: x, lambda x: x * 0),
    "zeros": (lambda x: x * 0, lambda x: x * 0),
    "a student to whom all is one": (lambda x: x[:1].expand_as(x), lambda x: x),
    "a teacher to whom all is one": (lambda x: x, lambda x: x[:1].expand_as(x)),
    "opposites and zeros": (lambda x: torch.cat([x[:1], -x[:1], x[2:] * 0])[: len(x)], lambda x: x),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("edge", [*EDGES, "student and teacher alike"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_at_the_edges_losses_gradients_and_memory_are_finite(case: Case, edge: str, dtype: torch.dtype) -> None:
    alike = edge not in EDGES
    case = Case(case.name, case.options, case.student_shapes, case.student_shapes) if alike else case
    changes = EDGES.get(edge, EDGES["random"])
    for rows in (0, 1, 2, 6):
        pair = answers(case, rows)
        student, teacher = (_as(seen, change) for seen, change in zip((pair[0], pair[0 if alike else 1]), changes, strict=True))
        for labels in (torch.arange(rows) % 5, torch.zeros(rows, dtype=torch.int64)):
            method = case.make().to(dtype)
            given, other = (_as(seen, lambda x: x.detach().clone(), dtype) for seen in (student, teacher))
            for leaf in leaves(given):
                leaf.requires_grad_()
            loss = batch_mean(method, given, other, labels)
            loss.backward()
            assert loss.isfinite()
            gradients = [x.grad for x in (*leaves(given), *method.parameters()) if x.grad is not None]
            assert gradients
            assert all((gradient.abs() < 1e6).all() for gradient in gradients)
            assert all(buffer.isfinite().all() for buffer in method.buffers())


def _as(seen: Seen, change: Any, dtype: torch.dtype = torch.float64) -> Seen:
    """The same with other features, and all of it in `dtype`."""
    return Seen(seen.logits_BK.detach().to(dtype), tuple(change(feature).to(dtype) for feature in seen.features))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_near_float64_for_half_precision_features_cast_up(case: Case) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        results = []
        for wide in (torch.float32, torch.float64):
            method, (student, teacher) = case.make().to(wide), answers(case, 8)
            moved = [_as(seen, lambda x, dtype=dtype: x.detach().to(dtype) + 1, wide) for seen in (student, teacher)]
            for leaf in leaves(moved[0]):
                leaf.requires_grad_()
            loss = batch_mean(method, *moved)
            loss.backward()
            results.append([loss.detach().double(), *(leaf.grad.double() for leaf in leaves(moved[0]) if leaf.grad is not None)])
        for narrow, wide_one in zip(*results, strict=True):
            torch.testing.assert_close(narrow, wide_one, rtol=0.02, atol=0.002 * float(wide_one.abs().max()))


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "crd" and "embedding" not in case.options], ids=str)
def test_a_student_that_sees_as_the_teacher_does_loses_nothing(case: Case) -> None:
    alike = Case(case.name, case.options, case.student_shapes, case.student_shapes)
    student, _ = answers(alike, 6)
    assert abs(batch_mean(alike.make(), student, _as(student, torch.Tensor.detach)).item()) < 1e-12


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_ranks_says_what_one_does(ranks: Ranks, case: Case) -> None:
    assert case.make().compares_samples
    assert_ranks_equal_one(ranks, case, (5, 3))
    assert_ranks_equal_one(ranks, case, (7, 0))
