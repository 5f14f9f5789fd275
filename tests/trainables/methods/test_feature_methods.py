"""fitnet, at, ab, ft, fsp, nst, vid, kdsvd: by hand, on edges, in every precision, and on any number of workers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trainables.methods.calls import make, samples
from trainables.distributed import Group
from trainables.errors import ExperimentError
from trainables.methods import load
from trainables.methods.ab import beyond_the_boundary
from trainables.methods.at import attention
from trainables.methods.contract import Method, Seen
from trainables.methods.features import ConvReg, average_pooled, body_parameters, pooled_alike, unit
from trainables.methods.fsp import flow
from trainables.methods.kdsvd import right_singular
from trainables.methods.nst import squared_mmd
from trainables.models.registry import build_model
from trainables.rank_pool import Ranks

Shapes = tuple[tuple[int, ...], ...]
Maps = tuple[Tensor, ...]

STUDENT: Shapes = ((4, 6, 6), (6, 4, 3), (8, 2, 2))
TEACHER: dict[str, Shapes] = {
    "fitnet": ((5, 6, 6), (7, 2, 2), (9, 4, 4)),
    "at": ((5, 6, 6), (7, 3, 4), (9, 3, 3)),
    "nst": ((5, 6, 6), (7, 3, 4), (20, 3, 3)),
    "vid": ((5, 6, 6), (7, 3, 4), (9, 3, 3)),
    "ab": ((5, 6, 6), (6, 4, 3), (9, 4, 4)),
    "ft": ((5, 6, 6), (7, 3, 4), (9, 3, 3)),
    "fsp": ((4, 5, 6), (6, 3, 3), (8, 3, 3)),
    "kdsvd": ((4, 5, 6), (6, 3, 3), (8, 3, 3)),
}
VARIANTS = {
    **dict.fromkeys(("fitnet", "at", "vid", "ab", "fsp", "kdsvd"), ("repdistiller", "paper")),
    "ft": ("repdistiller", "official", "paper"),
}
CASES = [(name, {"variant": variant}) for name in VARIANTS for variant in VARIANTS[name]] + [
    ("nst", {}),
    ("at", {"power": 3.0}),
    ("kdsvd", {"vectors": 2}),
    ("ab", {"margin": 0.5}),
]
every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=lambda part: part if isinstance(part, str) else str(part))


def maps(shapes: Shapes, rows: int, seed: int, dtype: torch.dtype = torch.float64) -> Maps:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, *shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)


def seen(features: Maps) -> Seen:
    return Seen(features[0].new_zeros(len(features[0]), 5), features)


def ask(method: Method, student: Maps, teacher: Maps, group: Group | None = None) -> dict[str, Tensor]:
    """Its terms, in training and in the stage before."""
    rows = torch.zeros(len(student[0]), dtype=torch.int64)
    found: dict[str, Tensor] = {}
    if method.init_terms:
        found |= method.warm_up(seen(student), seen(teacher), samples(rows, epoch=-1.0, group=group))
    return found | method(seen(student), seen(teacher), samples(rows, group=group))


def built(name: str, **options: Any) -> Method:
    return make(name, student_shapes=STUDENT, teacher_shapes=TEACHER[name], **options)


def learned(method: Method, student: Maps, teacher: Maps) -> tuple[Tensor, list[Tensor]]:
    """The sum of all terms, and its gradients, of the student's maps and of all parameters."""
    leaves = [feature.clone().requires_grad_() for feature in student]
    total = torch.stack([term.sum() for term in ask(method, tuple(leaves), teacher).values()]).sum()
    wanted = [*leaves, *method.parameters()]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return total.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


@every_case
def test_every_sample_has_its_share_of_each_term(name: str, options: dict[str, Any]) -> None:
    method = built(name, **options)
    terms = ask(method, maps(STUDENT, 3, 0), maps(TEACHER[name], 3, 1))
    assert tuple(terms) == method.init_terms + method.terms
    assert {tuple(term.shape) for term in terms.values()} == {(3,)}
    assert all(term.dtype == torch.float64 for term in terms.values())


@every_case
def test_gradients_are_those_of_finite_differences(name: str, options: dict[str, Any]) -> None:
    """Of the student's maps and of what each stage trains, each compared along one direction drawn at random."""
    method, teacher, rows = built(name, **options), seen(maps(TEACHER[name], 3, 1)), torch.zeros(3, dtype=torch.int64)
    settled = {id(parameter) for parameter in method.settled_parameters()}
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    stages = [(method.forward, [p for p in method.parameters() if id(p) not in settled])] if method.terms else []
    if method.init_terms:
        stages.append((method.warm_up, [p for p in method.parameters() if id(p) in settled]))
    for stage, own in stages:
        student = [feature.requires_grad_() for feature in maps(STUDENT, 3, 0)]
        leaves = [*student, *own]
        directions = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(7)) for x in leaves]

        def total(stage: Any = stage, student: list[Tensor] = student) -> Tensor:
            terms = stage(seen(tuple(student)), teacher, samples(rows))
            return torch.stack([(weights * term).sum() for term in terms.values()]).sum()

        gradients = torch.autograd.grad(total(), leaves, allow_unused=True)
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                for leaf, direction in zip(leaves, directions, strict=True):
                    leaf += step * direction
                sides.append(total().item())
                for leaf, direction in zip(leaves, directions, strict=True):
                    leaf -= step * direction
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
        assert slope == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-8)


EDGES = ["one sample", "no samples", "zeros", "a zero map", "equal features", "one value everywhere", "identical", "opposite"]


@pytest.mark.parametrize("edge", EDGES)
@every_case
def test_terms_and_gradients_are_finite_on_edges(name: str, options: dict[str, Any], edge: str) -> None:
    shapes = TEACHER[name]
    student, teacher = maps(STUDENT, 3, 0), maps(shapes, 3, 1)
    method = built(name, **options)
    if edge == "one sample":
        student, teacher = maps(STUDENT, 1, 0), maps(shapes, 1, 1)
    elif edge == "no samples":
        terms = ask(method.eval(), maps(STUDENT, 0, 0), maps(shapes, 0, 1))
        assert {tuple(term.shape) for term in terms.values()} == {(0,)}
        return
    elif edge == "zeros":
        student, teacher = (tuple(torch.zeros_like(x) for x in features) for features in (student, teacher))
    elif edge == "a zero map":
        student, teacher = tuple(x.relu() * (len(x) > 3) for x in student), tuple(x.relu() for x in teacher)
    elif edge == "equal features":
        student, teacher = (tuple(x[:1].expand_as(x) for x in features) for features in (student, teacher))
    elif edge == "one value everywhere":
        student, teacher = (tuple(torch.ones_like(x) for x in features) for features in (student, teacher))
    else:
        method = make(name, student_shapes=STUDENT, teacher_shapes=STUDENT, **options)
        teacher = student if edge == "identical" else tuple(-x for x in student)
    for dtype in (torch.float64, torch.float32):
        total, gradients = learned(method.to(dtype), tuple(x.to(dtype) for x in student), tuple(x.to(dtype) for x in teacher))
        assert total.isfinite()
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert max(float(gradient.abs().max()) for gradient in gradients) < 1e9


@pytest.mark.parametrize("name", ["at", "nst", "fsp", "kdsvd"])
def test_a_student_like_its_teacher_loses_nothing(name: str) -> None:
    method, features = make(name, student_shapes=STUDENT, teacher_shapes=STUDENT), maps(STUDENT, 3, 0)
    total, gradients = learned(method, features, features)
    assert total.abs() < 1e-14
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-12


@every_case
def test_float32_is_within_2_percent_of_float64_and_rounded_features_stay_finite(name: str, options: dict[str, Any]) -> None:
    student, teacher = maps(STUDENT, 5, 0), maps(TEACHER[name], 5, 1)
    exact, wide = learned(built(name, **options), student, teacher)
    single, narrow = learned(built(name, **options).float(), tuple(x.float() for x in student), tuple(x.float() for x in teacher))
    assert single.dtype == torch.float32
    assert abs(single - exact) < 0.02 * abs(exact)
    largest = max(float(gradient.norm()) for gradient in wide)
    for a, b in zip(wide, narrow, strict=True):
        assert (a - b).norm() <= 0.02 * a.norm() + 1e-6 * largest  # a bias before a batch norm has none but by rounding
    for dtype in (torch.bfloat16, torch.float16):
        rounded = (tuple((30 * x).to(dtype).float() for x in features) for features in (student, teacher))
        total, gradients = learned(built(name, **options).float(), *rounded)
        assert total.isfinite()
        assert all(gradient.isfinite().all() for gradient in gradients)


def on_a_rank(group: Group, name: str, sizes: tuple[int, ...]) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Terms of the own rows, their gradients, and the parameters' times the number of ranks, as DDP's mean wants them."""
    begin = sum(sizes[: group.rank])
    rows = slice(begin, begin + sizes[group.rank])
    student, teacher = maps(STUDENT, sum(sizes), 0), maps(TEACHER[name], sum(sizes), 1)
    method = make(name, student_shapes=STUDENT, teacher_shapes=TEACHER[name], group=group)
    leaves = tuple(feature[rows].clone().requires_grad_() for feature in student)
    terms = ask(method, leaves, tuple(feature[rows] for feature in teacher), group)
    total = torch.stack([term.sum() for term in terms.values()]).sum() / sum(sizes)
    own = list(method.parameters())
    found = torch.autograd.grad(total, [*leaves, *own], allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip([*leaves, *own], found, strict=True)]
    n = len(leaves)
    return {key: term.detach() for key, term in terms.items()}, gradients[:n], gradients[n:]


@pytest.mark.parametrize("sizes", [(5, 3), (7, 0)])
@pytest.mark.parametrize("name", TEACHER)
def test_two_workers_with_uneven_rows_equal_one(ranks: Ranks, name: str, sizes: tuple[int, ...]) -> None:
    (terms, features, own) = on_a_rank(Group(), name, (sum(sizes),))
    parts = ranks.run(2, on_a_rank, name, sizes)
    for key, term in terms.items():
        torch.testing.assert_close(torch.cat([part[0][key] for part in parts]), term, rtol=1e-9, atol=1e-12)
    for place, gradient in enumerate(features):
        torch.testing.assert_close(torch.cat([part[1][place] for part in parts]), gradient, rtol=1e-9, atol=1e-12)
    for place, gradient in enumerate(own):
        torch.testing.assert_close(parts[0][2][place] + parts[1][2][place], gradient, rtol=1e-9, atol=1e-12)


# What the methods calculate.


def only(method: Method, student: Maps, teacher: Maps) -> list[float]:
    (term,) = ask(method, student, teacher).values()
    found: list[float] = term.tolist()
    return found


def test_fitnet_is_the_mean_square_of_what_the_regressor_misses_and_in_the_paper_half_the_sum() -> None:
    student, teacher = maps(((2, 3, 3),), 4, 0), maps(((5, 3, 3),), 4, 1)
    shapes = {"student_shapes": ((2, 3, 3),), "teacher_shapes": ((5, 3, 3),)}
    method = make("fitnet", **shapes)
    regressor = method.regressors[0]
    assert isinstance(regressor, ConvReg)
    weight, bias = (parameter.detach().numpy() for parameter in regressor.conv.parameters())
    convolved = np.einsum("bchw,oc->bohw", student[0].numpy(), weight[:, :, 0, 0]) + bias[:, None, None]
    mean, variance = (f((0, 2, 3))[:, None, None] for f in (convolved.mean, convolved.var))
    normed = np.maximum((convolved - mean) / np.sqrt(variance + 1e-5), 0)
    squares = ((teacher[0].numpy() - normed) ** 2).reshape(4, -1)
    np.testing.assert_allclose(only(method, student, teacher), squares.mean(1), rtol=1e-12)
    np.testing.assert_allclose(only(make("fitnet", variant="paper", **shapes), student, teacher), squares.sum(1) / 2, rtol=1e-12)


def test_at_compares_directions_of_attention() -> None:
    student = torch.tensor([[[[3.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]]], dtype=torch.float64)
    teacher = torch.tensor([[[[0.0, 0.0], [-1.0, 0.0]]]], dtype=torch.float64)
    shapes = {"student_shapes": ((2, 2, 2),), "teacher_shapes": ((1, 2, 2),)}
    torch.testing.assert_close(attention(student)[0], torch.tensor([9.0, 4.0, 0.0, 0.0], dtype=torch.float64) / math.sqrt(97))
    assert only(make("at", **shapes), (student,), (teacher,)) == pytest.approx([2 / 4])
    assert only(make("at", variant="paper", **shapes), (student,), (teacher,)) == pytest.approx([math.sqrt(2) / 2])
    assert only(make("at", **shapes), (student,), (-7 * student[:, :1] - 7 * student[:, 1:],)) == pytest.approx(
        [((np.array([9, 4]) / math.sqrt(97) - np.array([9, 4]) / math.sqrt(97)) ** 2).mean()]
    )


def test_nst_is_the_mean_over_pairs_of_channels_in_both_of_its_forms() -> None:
    for students, teachers, positions in ((3, 5, 4), (3, 5, 9), (2, 2, 2)):
        s, t = (unit(x) for x in maps(((students, positions), (teachers, positions)), 2, 0))
        expected = [
            np.mean([(x @ y) ** 2 for x in a for y in a])
            + np.mean([(x @ y) ** 2 for x in b for y in b])
            - 2 * np.mean([(x @ y) ** 2 for x in a for y in b])
            for a, b in zip(s.numpy(), t.numpy(), strict=True)
        ]
        np.testing.assert_allclose(squared_mmd(s, t).numpy(), expected, rtol=1e-11)


def test_vid_is_the_negative_log_density_of_a_normal_distribution_with_a_variance_of_5_at_first() -> None:
    student, teacher = maps(((2, 3, 3),), 4, 0), maps(((5, 3, 3),), 4, 1)
    shapes = {"student_shapes": ((2, 3, 3),), "teacher_shapes": ((5, 3, 3),)}
    for variant, reduce in (("repdistiller", np.mean), ("paper", np.sum)):
        method = make("vid", variant=variant, **shapes)
        mean = student[0].numpy()
        for place, weight in enumerate(parameter.detach().numpy() for parameter in method.parameters() if parameter.ndim == 4):
            mean = np.einsum("bchw,oc->bohw", mean if place == 0 else np.maximum(mean, 0), weight[:, :, 0, 0])
        densities = (teacher[0].numpy() - mean) ** 2 / 10 + math.log(5) / 2
        np.testing.assert_allclose(only(method, student, teacher), reduce(densities.reshape(4, -1), axis=1), rtol=1e-6)


def test_vid_learns_its_variances() -> None:
    method = built("vid")
    _, gradients = learned(method, maps(STUDENT, 3, 0), maps(TEACHER["vid"], 3, 1))
    names = [f"map {place}" for place in range(3)] + [name for name, _ in method.named_parameters()]
    assert all(float(gradient.abs().min()) > 0 for name, gradient in zip(names, gradients, strict=True) if "variance" in name)


def test_ab_pulls_each_value_to_its_side_of_the_margin_and_no_further() -> None:
    student = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    on, off = torch.tensor(0.1), torch.tensor(0.0)
    assert beyond_the_boundary(student, on, 1.0).tolist() == [3.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert beyond_the_boundary(student, off, 1.0).tolist() == [0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0]


def test_ab_counts_later_stages_more_and_adapts_only_maps_that_differ() -> None:
    shapes = {"student_shapes": ((1, 1, 1),) * 3, "teacher_shapes": ((1, 1, 1),) * 3}
    method, ones = make("ab", **shapes), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    assert [type(connector) for connector in method.connectors] == [nn.Identity] * 3
    for stage, weight in enumerate((0.25, 0.5, 1.0)):
        student = tuple(ones * (-2 if place == stage else 1) for place in range(3))
        assert only(method, student, (ones,) * 3) == pytest.approx([9 * weight * 3 / 1000])
        assert only(make("ab", variant="paper", **shapes), student, (ones,) * 3) == pytest.approx([9])
    adapted = built("ab").connectors
    assert [type(connector) for connector in adapted] == [ConvReg, nn.Identity, ConvReg]
    assert isinstance(adapted[0], ConvReg)
    assert isinstance(adapted[0].activation, nn.Identity)


def test_fsp_is_the_product_of_channels_averaged_over_positions() -> None:
    student, teacher = maps(((2, 4, 4), (3, 2, 2)), 2, 0), maps(((2, 2, 2), (3, 2, 4)), 2, 1)
    shapes = {"student_shapes": ((2, 4, 4), (3, 2, 2)), "teacher_shapes": ((2, 2, 2), (3, 2, 4))}

    def expected(earlier: Tensor, later: Tensor, best: Any) -> np.ndarray:
        a, b = earlier.numpy(), later.numpy()
        a = best(a.reshape(2, 2, 2, a.shape[2] // 2, 2, a.shape[3] // 2), axis=(3, 5))
        b = best(b.reshape(2, 3, 2, b.shape[2] // 2, 2, b.shape[3] // 2), axis=(3, 5))
        return np.array(np.einsum("bihw,bjhw->bij", a, b) / 4)

    for variant, best, reduce in (("repdistiller", np.mean, np.mean), ("paper", np.max, np.sum)):
        mine, theirs = expected(*student, best), expected(*teacher, best)
        np.testing.assert_allclose(flow(*student, maximum=variant == "paper").numpy(), mine, rtol=1e-12)
        found = only(make("fsp", variant=variant, **shapes), student, teacher)
        np.testing.assert_allclose(found, reduce((mine - theirs) ** 2, axis=(1, 2)), rtol=1e-12)


def test_ft_compares_normed_factors() -> None:
    student, teacher = maps(((2, 3, 3),), 4, 0), maps(((6, 3, 3),), 4, 1)
    shapes = {"student_shapes": ((2, 3, 3),), "teacher_shapes": ((6, 3, 3),)}
    for variant in VARIANTS["ft"]:
        method = make("ft", variant=variant, **shapes)
        own = method.translators[0](student[0]).detach().numpy()
        wanted = method.paraphrasers[0](teacher[0]).detach().numpy()
        assert own.shape == wanted.shape == (4, 3, 3, 3)
        if variant == "repdistiller":
            own, wanted = (own**2).mean(1), (wanted**2).mean(1)
        own, wanted = (x.reshape(4, -1) / np.linalg.norm(x.reshape(4, -1), axis=1, keepdims=True) for x in (own, wanted))
        differences = np.abs(own - wanted)
        expected = differences.sum(1) if variant == "paper" else differences.mean(1)
        terms = ask(method, student, teacher)
        np.testing.assert_allclose(terms["factor"].detach().numpy(), expected, rtol=1e-12)
        rebuilt = method.builders[0](method.paraphrasers[0](teacher[0])).detach()
        torch.testing.assert_close(terms["reconstruction"].detach(), (rebuilt - teacher[0]).square().flatten(1).mean(1))
        norms = [module for module in method.modules() if "BatchNorm" in type(module).__name__]
        assert len(norms) == (3 if variant == "repdistiller" else 0)


def test_kdsvd_is_that_of_numpys_singular_vectors() -> None:
    shapes: Shapes = ((4, 3, 3), (6, 2, 2), (5, 1, 2))
    student, teacher = maps(shapes, 3, 0), maps(shapes, 3, 1)

    def aligned(s: np.ndarray, t: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        _, values, rows = np.linalg.svd(t.reshape(len(t), -1).T, full_matrices=False)
        theirs = rows[:k].T
        theirs = theirs * np.sign(theirs[np.abs(theirs).argmax(0), range(k)])
        mine = np.linalg.svd(s.reshape(len(s), -1).T, full_matrices=False)[2][: k + 3].T
        cosine = mine.T @ theirs
        best = np.abs(cosine).argmax(0)
        weights = values[:k] / np.linalg.norm(values[:k])
        return mine[:, best] * np.sign(cosine[best, range(k)]) * weights, theirs * weights

    for k in (1, 2):
        expected = []
        for row in range(3):
            pairs = [aligned(s[row].numpy(), t[row].numpy(), k) for s, t in zip(student, teacher, strict=True)]
            relations = [
                [np.exp(-((b[:, None] - a[None]) ** 2) / 8) for a, b in pairwise(side)] for side in zip(*pairs, strict=True)
            ]
            expected.append(sum(((s - t) ** 2).sum() for s, t in zip(*relations, strict=True)))
        about = {"student_shapes": shapes, "teacher_shapes": shapes, "vectors": k}
        np.testing.assert_allclose(only(make("kdsvd", **about), student, teacher), expected, rtol=1e-9)
        half = only(make("kdsvd", variant="paper", **about), student, teacher)
        np.testing.assert_allclose(half, 0.5 * math.sqrt(k) * np.array(expected), rtol=1e-9)


def test_singular_vectors_are_those_of_both_gram_matrices_and_no_more_than_there_are() -> None:
    for channels, height in ((3, 4), (7, 2)):
        (features,) = maps(((channels, height, height),), 2, 0)
        values, vectors = right_singular(features, 6)
        assert vectors.shape == (2, channels, min(channels, height**2, 6))
        rows = np.linalg.svd(features.flatten(2).mT.numpy(), full_matrices=False)
        np.testing.assert_allclose(values.numpy(), rows[1][:, :6], rtol=1e-9)
        cosines = np.einsum("bck,bkc->bk", vectors.numpy(), rows[2][:, :6])
        np.testing.assert_allclose(np.abs(cosines), 1, rtol=1e-9)


def test_features_that_are_not_finite_raise_nothing_in_kdsvd() -> None:
    student = tuple(torch.full_like(x, torch.nan) for x in maps(STUDENT, 2, 0))
    ask(built("kdsvd"), student, maps(TEACHER["kdsvd"], 2, 1))


# What they need.


@pytest.mark.parametrize("name", ["ab", "fsp", "ft"])
def test_the_stage_before_training_is_as_long_as_the_options_say(name: str) -> None:
    assert built(name).init_epochs == 30
    assert built(name, init_epochs=7).init_epochs == 7


def test_the_stage_before_training_moves_what_its_loss_reaches() -> None:
    student = build_model("resnet8", num_classes=5, image_size=8, seed=0)
    body = {name for name, _ in student.named_parameters() if not name.startswith("fc.")}
    assert len(body) == len(list(student.parameters())) - 2
    assert {id(p) for p in body_parameters(student)} == {id(p) for name, p in student.named_parameters() if name in body}
    for name in ("ab", "fsp"):
        method = built(name)
        trained = [id(parameter) for parameter in method.warm_up_parameters(student)]
        assert trained == [id(p) for p in (*body_parameters(student), *method.parameters())]
        assert len(method.settled_parameters()) == len(list(method.parameters()))
    ft = built("ft")
    settled = {id(parameter) for parameter in ft.settled_parameters()}
    assert settled == {id(parameter) for parameter in ft.warm_up_parameters(student)}
    assert settled == {id(p) for name, p in ft.named_parameters() if not name.startswith("translators.")}


@pytest.mark.parametrize("name", TEACHER)
def test_parameters_that_are_trained_together_all_get_a_gradient(name: str) -> None:
    """DDP waits for each of them."""
    method = built(name)
    settled = {id(parameter) for parameter in method.settled_parameters()}
    wanted = [parameter for parameter in method.parameters() if id(parameter) not in settled]
    if not wanted:
        return
    terms = method(seen(maps(STUDENT, 3, 0)), seen(maps(TEACHER[name], 3, 1)), samples(torch.zeros(3, dtype=torch.int64)))
    total = torch.stack([term.sum() for term in terms.values()]).sum()
    assert all(gradient is not None for gradient in torch.autograd.grad(total, wanted, allow_unused=True))


@pytest.mark.parametrize(
    ("name", "student", "teacher", "says"),
    [
        (
            "at",
            ((8,),),
            ((8, 2, 2),),
            "options.at.student_taps: at reads maps (C, H, W), tap 1 of the student gives (8,)",
        ),
        ("vid", ((8, 2, 2),), ((4, 16),), "distill.options.vid.teacher_taps: vid reads maps"),
        ("nst", ((8, 2, 2),) * 2, ((8, 2, 2),) * 3, "the student has 2 maps, the teacher 3"),
        ("ab", (), (), "ab reads 1 maps or more, not 0"),
        ("fsp", ((8, 2, 2),), ((8, 2, 2),), "fsp reads 2 maps or more, not 1"),
        ("kdsvd", ((8, 2, 2),), ((8, 2, 2),), "kdsvd reads 2 maps or more"),
        ("fsp", ((4, 2, 2), (8, 2, 2)), ((4, 2, 2), (9, 2, 2)), "not 8 of the student with 9 of the teacher"),
        ("kdsvd", ((4, 2, 2), (8, 2, 2)), ((4, 2, 2), (9, 2, 2)), "not 8 of the student with 9 of the teacher"),
        ("fitnet", ((4, 2, 2),), ((4, 3, 3),), "no regressor turns the student's map (4, 2, 2) into the teacher's (4, 3, 3)"),
    ],
)
def test_models_that_do_not_fit_are_refused_in_one_line(name: str, student: Shapes, teacher: Shapes, says: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        make(name, student_shapes=student, teacher_shapes=teacher)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stage_before_training_of_no_epochs_is_refused_where_nothing_else_is_learned() -> None:
    for name in ("ab", "fsp"):
        with pytest.raises(ValueError, match="init_epochs"):
            load(name).Options.model_validate({"init_epochs": 0})


# What they share.


def test_a_regressor_gives_the_teachers_shape() -> None:
    for student, teacher in (
        ((3, 8, 8), (5, 4, 4)),
        ((3, 4, 4), (5, 8, 8)),
        ((3, 4, 4), (5, 4, 4)),
        ((3, 7, 5), (5, 3, 4)),
        ((3, 8, 4), (5, 4, 4)),
    ):
        assert ConvReg(student, teacher, Group())(torch.zeros(2, *student)).shape == (2, *teacher)


def test_a_zero_vector_has_no_direction_and_no_gradient() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    direction = unit(x)
    torch.testing.assert_close(direction, torch.tensor([[0.0, 0.0], [0.6, 0.8]]))
    direction[:, 0].sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0.0, 0.0], [0.128, -0.096]]))


def test_of_two_maps_each_side_is_pooled_to_the_smaller() -> None:
    a, b = pooled_alike(*maps(((2, 6, 3), (3, 4, 5)), 2, 0))
    assert (a.shape, b.shape) == ((2, 2, 4, 3), (2, 3, 4, 3))
    (x,) = maps(((2, 8, 6),), 2, 0)
    for size in ((4, 3), (8, 2), (8, 6), (3, 4), (1, 1)):
        torch.testing.assert_close(average_pooled(x, *size), nn.functional.adaptive_avg_pool2d(x, size), rtol=1e-12, atol=1e-14)
