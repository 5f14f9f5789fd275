"""The methods on feature maps beside references that were written from the papers alone."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from torch import nn

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
    teacher_model,
)
from tests.trainables.methods.references import features as reference
from tests.trainables.methods.references.basic import Array


def layer(inputs: Inputs, convolution: str, norm: str | None = None) -> reference.Layer:
    """The convolution of this name among the method's parameters, with the batch norm of that name behind it."""
    known = inputs.parameters
    behind = None if norm is None else (known[f"{norm}.weight"], known[f"{norm}.bias"])
    return reference.Layer(known[f"{convolution}.weight"], known.get(f"{convolution}.bias"), behind)


def maps(inputs: Inputs) -> tuple[list[Array], list[Array]]:
    return inputs.student, inputs.teacher


def fitnet(inputs: Inputs) -> Terms:
    pairs = enumerate(zip(*maps(inputs), strict=True))
    hints = [reference.fitnet(s, t, layer(inputs, f"regressors.{at}.conv", f"regressors.{at}.norm")) for at, (s, t) in pairs]
    return {"hint": np.sum(hints, axis=0)}


def at(inputs: Inputs, variant: str = "repdistiller", power: float = 2.0) -> Terms:
    return {"attention": reference.at(*maps(inputs), power, variant)}


def ab(inputs: Inputs, variant: str = "repdistiller", margin: float = 1.0) -> Terms:
    connectors = [
        None if s.shape == t.shape else layer(inputs, f"connectors.{at}.conv", f"connectors.{at}.norm")
        for at, (s, t) in enumerate(zip(*maps(inputs), strict=True))
    ]
    return {"boundary": reference.ab(*maps(inputs), connectors, margin, variant)}


def ft(inputs: Inputs, variant: str = "repdistiller") -> Terms:
    encoder, decoder = ([layer(inputs, f"{part}.0.{number}") for number in (0, 2, 4)] for part in ("paraphrasers", "builders"))
    if variant == "repdistiller":
        translator = [layer(inputs, f"translators.0.{3 * number}", f"translators.0.{3 * number + 1}") for number in range(3)]
    else:
        translator = [layer(inputs, f"translators.0.{2 * number}") for number in range(3)]
    (student,), (teacher,) = maps(inputs)
    factors = reference.ft_encode(student, translator), reference.ft_encode(teacher, encoder)
    return {"reconstruction": reference.ft_reconstruction(teacher, encoder, decoder), "factor": reference.ft(*factors, variant)}


def fsp(inputs: Inputs) -> Terms:
    return {"flow": reference.fsp(*maps(inputs))}


def fsp_paper(inputs: Inputs) -> Terms:
    """The paper pools by the maximum, which is done here; what is left of two maps has one size."""

    def shrunk(map_BCHW: Array, height: int) -> Array:
        window = map_BCHW.shape[2] // height
        return map_BCHW.reshape(*map_BCHW.shape[:2], height, window, height, window).max(axis=(3, 5))

    def alike(earlier: Array, later: Array) -> list[Array]:
        height = min(earlier.shape[2], later.shape[2])
        return [shrunk(earlier, height), shrunk(later, height)]

    pairs = zip(pairwise(inputs.student), pairwise(inputs.teacher), strict=True)
    return {"flow": np.sum([reference.fsp(alike(*s), alike(*t), "paper") for s, t in pairs], axis=0)}


def nst(inputs: Inputs) -> Terms:
    return {"mmd": reference.nst(*maps(inputs))}


def vid(inputs: Inputs, variant: str = "repdistiller") -> Terms:
    stages, known = range(len(inputs.student)), inputs.parameters
    weights = [tuple(known[f"normals.{at}.mean.{number}.weight"] for number in (0, 2, 4)) for at in stages]
    raw = [known[f"normals.{at}.raw_variance_C"] for at in stages]
    return {"information": reference.vid(*maps(inputs), weights, raw, variant=variant)}  # type: ignore[arg-type]


def kdsvd(inputs: Inputs, vectors: int = 1) -> Terms:
    return {"relation": reference.kdsvd(*maps(inputs), vectors)}


def ofd(inputs: Inputs) -> Terms:
    norms = [module for module in teacher_model().modules() if isinstance(module, nn.BatchNorm2d)]
    margins = [reference.ofd_margin(norm.weight.numpy(), norm.bias.numpy()) for norm in norms]
    connectors = [layer(inputs, f"_connectors.{at}.0", f"_connectors.{at}.1") for at in range(len(norms))]
    return {"partial": reference.ofd(*maps(inputs), connectors, margins)}


def reviewkd(inputs: Inputs) -> Terms:
    fusions = []
    for at in range(len(inputs.student)):
        name = f"_fusions.{at}"
        attention = (inputs.parameters.get(f"{name}.attention.{which}") for which in ("weight", "bias"))
        narrow, widen = (layer(inputs, f"{name}.{part}.0", f"{name}.{part}.1") for part in ("narrow", "widen"))
        fusions.append(reference.Fusion(narrow, widen, *attention))
    levels = ([x if x.ndim == 4 else x[:, :, None, None] for x in side] for side in maps(inputs))
    return {"review": reference.reviewkd(*levels, fusions)}


def simkd(inputs: Inputs) -> Terms:
    """Of what the projector, which is the student's, has made already."""
    nothing = np.zeros((1, inputs.teacher[0].shape[1])), np.zeros(1)
    return {"feature": reference.simkd(inputs.student[0], inputs.teacher[0], [], nothing)[0]}


def srrl(inputs: Inputs) -> Terms:
    head: Any = teacher_model().head
    classifier = head.weight.numpy(), head.bias.numpy()
    variant = "official" if inputs.student[0].ndim == 4 else "simkd"
    shifted = inputs.student[0], inputs.teacher[0], inputs.teacher_BK, layer(inputs, "_connector.0", "_connector.1"), classifier
    matching, regression = reference.srrl(*shifted, variant)
    return {"feature": matching, "regression": regression}


def semckd(inputs: Inputs, temperature: float = 1.0) -> Terms:
    def embeds(part: str, stages: int) -> list[reference.Embed]:
        names = ("0.weight", "0.bias", "2.weight", "2.bias")
        return [reference.Embed(*(inputs.parameters[f"{part}.{at}.{name}"] for name in names)) for at in range(stages)]

    students, teachers = (len(side) for side in maps(inputs))
    projections = []
    for s in range(students):
        rows = [f"_regressors.{s}.{t}" for t in range(teachers)]
        projections.append(
            [[layer(inputs, f"{r}.0", f"{r}.1"), layer(inputs, f"{r}.3", f"{r}.4"), layer(inputs, f"{r}.6")] for r in rows]
        )
    attended = embeds("_queries", students), embeds("_keys", teachers)
    return {"calibrated": float(reference.semckd(*maps(inputs), *attended, projections, temperature).mean())}


def case(name: str, expected: Any, student: Sequence[Any], teacher: Sequence[Any], **options: Any) -> Comparison:
    needs_model = {"teacher": teacher_model} if name in ("ofd", "srrl") else {}
    found = lambda inputs: expected(inputs, **options)  # noqa: E731
    return Comparison(name, found, options, tuple(student), tuple(teacher), rows=3, **needs_model)


# Sizes that are equal, that differ either way by a whole factor and not by one, and that are not square.
ANY = ((2, 4, 4), (3, 5, 4), (4, 2, 2)), ((3, 4, 4), (5, 3, 3), (2, 3, 3))
REGRESSED = ((2, 4, 4), (3, 2, 2), (2, 5, 3), (3, 3, 3)), ((3, 2, 2), (2, 4, 4), (4, 2, 2), (3, 3, 3))
SAME_CHANNELS = ((2, 5, 4), (3, 3, 3), (4, 2, 2)), ((2, 3, 3), (3, 2, 2), (4, 2, 2))
POOLED_BY_2 = ((2, 4, 4), (3, 2, 2), (4, 2, 2)), ((2, 2, 2), (3, 4, 4), (4, 2, 2))
OF_THE_MODEL = (8, 8, 8), (16, 4, 4), (32, 2, 2)

METHODS = [
    case("fitnet", fitnet, *REGRESSED),
    *(case("at", at, *ANY, variant=variant) for variant in ("repdistiller", "paper")),
    case("at", at, *ANY, power=3.0),
    *(case("ab", ab, *REGRESSED, variant=variant) for variant in ("repdistiller", "paper")),
    case("ab", ab, *REGRESSED, margin=0.5),
    *(case("ft", ft, [(2, 4, 4)], [(4, 3, 3)], variant=variant) for variant in ("repdistiller", "paper")),
    case("fsp", fsp, *SAME_CHANNELS),
    Comparison("fsp", fsp_paper, {"variant": "paper"}, *POOLED_BY_2, rows=3),
    case("nst", nst, *ANY),
    case("nst", nst, [(9, 2, 2)], [(2, 2, 2)]),
    *(case("vid", vid, *ANY, variant=variant) for variant in ("repdistiller", "paper")),
    *(case("kdsvd", kdsvd, *SAME_CHANNELS, vectors=k) for k in (1, 3)),
    case("ofd", ofd, [(2, 8, 8), (3, 4, 4), (2, 1, 1)], OF_THE_MODEL),
    case("reviewkd", reviewkd, [(2, 5, 5), (3, 3, 3), (4, 2, 2), (3,)], [(3, 6, 6), (2, 3, 3), (3, 1, 1), (5,)]),
    case("simkd", simkd, [(4, 3, 3)], [(4, 2, 2)]),
    case("srrl", srrl, [(3, 3, 2)], [(32,)]),
    case("srrl", srrl, [(6,)], [(32,)]),
    case("semckd", semckd, [(2, 4, 4), (3, 2, 2)], [(3, 2, 2), (2, 3, 3)]),
]
every_method = pytest.mark.parametrize("case", METHODS, ids=str)


@pytest.mark.parametrize("edge", EDGES)
@every_method
def test_values_are_the_references_and_gradients_are_finite(case: Comparison, edge: str) -> None:
    if case.name == "kdsvd" and edge in ("a student of zeros", "a zero among the student's"):
        assert_finite(*at_edge(case, edge))  # any vector is a singular one of a map of zeros
    else:
        assert_as_the_reference(*at_edge(case, edge))


@every_method
def test_gradients_are_those_of_the_reference(case: Comparison) -> None:
    assert_gradients_are_the_references(case, directions=1)


@every_method
def test_features_in_half_precision_give_nearly_the_same_and_huge_ones_stay_finite(case: Comparison) -> None:
    assert_half_precision_is_near(case)


@every_method
def test_a_batch_may_be_empty(case: Comparison) -> None:
    assert_a_batch_may_be_empty(case)


@every_method
def test_maps_of_one_value_and_opposite_models_give_finite_gradients(case: Comparison) -> None:
    student, teacher = case.answers()
    assert_finite(case, [x * 0 + 1 for x in student], [x * 0 + 1 for x in teacher])
    assert_finite(case.of_equal_models(), [-x for x in teacher], teacher)
