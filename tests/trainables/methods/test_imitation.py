"""embed and queue: beside references that were written from the papers alone, on any number of workers, and without labels."""

from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.trainables.methods.against import (
    EDGES,
    Comparison,
    Inputs,
    Terms,
    assert_a_batch_may_be_empty,
    assert_as_the_reference,
    assert_gradients_are_the_references,
    assert_half_precision_is_near,
    at_edge,
)
from tests.trainables.methods.calls import make, samples
from tests.trainables.methods.references import imitation as reference
from tests.trainables.methods.references.basic import Array, unit
from tests.trainables.methods.split import Case, answers, assert_ranks_equal_one
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ExperimentError
from trainables.methods.contract import Method, ModelOutputs
from trainables.methods.embed import Embed
from trainables.methods.queue import Queue
from trainables.methods.registry import load_method
from trainables.notices import notices_to

Shapes = tuple[tuple[int, ...], ...]

SHARES: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "radio": ({"cosine": 1.0}, {"cosine": 0.9, "smooth_l1": 0.1}),
    "unic": ({"cosine": 0.5, "smooth_l1": 0.5},) * 2,
    "mse": ({"mse": 1.0},) * 2,
    "cosine": ({"cosine": 1.0},) * 2,
    "normalized_mse": ({"normalized_mse": 1.0},) * 2,
}


def embed(inputs: Inputs, loss: str = "radio", layers: int = 2, standardize: str = "none", resize: str = "larger") -> Terms:
    (s_BD, s_BDHW), (t_BD, t_BDHW) = inputs.student, inputs.teacher
    heads = [
        partial(reference.head, parameters=inputs.parameters, name=f"heads.{name}", layers=layers)
        for name in ("embedding", "map")
    ]
    if standardize == "layer_norm":
        t_BD = np.array([reference.normed(t) for t in t_BD]).reshape(t_BD.shape)
        t_BDHW = np.array([reference.of_positions(lambda x: reference.normed(x[0])[None], t) for t in t_BDHW])
    projected = [reference.of_positions(heads[1], s) for s in s_BDHW]
    size_s, size_t = s_BDHW.shape[2:], t_BDHW.shape[2:]
    takes_students = resize == "teacher" or (resize == "larger" and np.prod(size_s) <= np.prod(size_t))
    common = size_s if takes_students else size_t
    maps = [(reference.bilinear(s, *common), reference.bilinear(t, *common)) for s, t in zip(projected, t_BDHW, strict=True)]
    of_embedding, of_map = SHARES[loss]
    return {
        "embedding": np.array([reference.mixture(s, t, of_embedding) for s, t in zip(heads[0](s_BD), t_BD, strict=True)]),
        "map": np.array([reference.mean_over_positions(s, t, of_map) for s, t in maps]),
    }


QUEUE = np.array([unit(row) for row in np.random.default_rng(5).normal(size=(8, 3))])


def queue(inputs: Inputs, entered: int = 5, size: int = 8, temperature: float = 0.07) -> Terms:
    """`entered` rows of QUEUE are filled."""
    (s_BD, s_BDHW), (t_BD, t_BDHW) = inputs.student, inputs.teacher
    heads = [
        partial(reference.head, parameters=inputs.parameters, name=f"heads.{name}", layers=1) for name in ("embedding", "map")
    ]
    heads = [partial(project, parameters=alone(inputs.parameters)) for project in heads]
    rows = reference.newest(QUEUE[:entered], list(t_BD), size)
    of_queue = [reference.similarities_kl(s, t, (rows, rows), temperature) for s, t in zip(heads[0](s_BD), t_BD, strict=True)]
    of_map = []
    for s_DHW, t_DHW in zip(s_BDHW, t_BDHW, strict=True):
        student = reference.bilinear(reference.of_positions(heads[1], s_DHW), *t_DHW.shape[1:])
        positions = [list(x.reshape(len(x), -1).T) for x in (student, t_DHW)]
        of_map.append(
            np.mean(
                [reference.similarities_kl(s, t, (positions[0], positions[1]), 0.07) for s, t in zip(*positions, strict=True)]
            )
        )
    return {"embedding": np.array(of_queue), "map": np.array(of_map)}


def alone(parameters: dict[str, Array]) -> dict[str, Array]:
    """The names of a linear layer as if it were the first of several."""
    return {f"{name.rpartition('.')[0]}.0.{name.rpartition('.')[2]}": value for name, value in parameters.items()}


STUDENT: Shapes = (4,), (5, 3, 4)
SMALLER: Shapes = (3,), (3, 2, 2)
LARGER: Shapes = (6,), (2, 5, 4)


def case(name: str, expected: Any, teacher: Shapes, options: dict[str, Any] | None = None, **more: Any) -> Comparison:
    return Comparison(name, expected, options or {}, STUDENT, teacher, rows=3, **more)


def filled(entered: int) -> dict[str, Any]:
    return {"memory": {"queue_QD": QUEUE, "num_entered": np.array(entered)}}


METHODS = [
    *(case("embed", partial(embed, loss=loss), SMALLER, {"loss": loss}) for loss in SHARES),
    case("embed", embed, LARGER),
    case("embed", partial(embed, resize="student"), LARGER, {"resize": "student"}),
    case("embed", partial(embed, resize="teacher", loss="mse"), SMALLER, {"resize": "teacher", "loss": "mse"}),
    case("embed", partial(embed, layers=1), SMALLER, {"layers": 1}),
    case("embed", partial(embed, layers=3), SMALLER, {"layers": 3, "hidden": 4}),
    case("embed", partial(embed, standardize="layer_norm", loss="mse"), LARGER, {"standardize": "layer_norm", "loss": "mse"}),
    case("queue", queue, SMALLER, {"queue_size": 8}, **filled(5)),
    case("queue", partial(queue, temperature=0.2), SMALLER, {"queue_size": 8, "temperature": 0.2}, **filled(5)),
]
every_method = pytest.mark.parametrize("case", METHODS, ids=str)


@pytest.mark.parametrize("edge", EDGES)
@every_method
def test_values_are_the_references_and_gradients_are_finite(case: Comparison, edge: str) -> None:
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


# Any number of workers


@pytest.mark.parametrize(
    "case",
    [
        Case("embed", {}, STUDENT, LARGER),
        Case("queue", {"queue_size": 16}, STUDENT, SMALLER, steps=3),
        Case("queue", {"queue_size": 4, "map": 0}, STUDENT[:1], SMALLER[:1], steps=3),
    ],
    ids=str,
)
def test_any_number_of_ranks_says_what_one_does(ranks: RankPool, case: Case) -> None:
    assert_ranks_equal_one(ranks, case, (5, 0, 2))


# Loss values of about 1, whatever the teacher


def test_a_balanced_loss_is_the_plain_one_over_its_running_mean_which_has_no_gradient(ranks: RankPool) -> None:
    plain, balanced = (
        Case("embed", options, STUDENT, LARGER).make() for options in ({"loss": "mse"}, {"loss": "mse", "balance": True})
    )
    mean, labels_B = 0.0, torch.zeros(6, dtype=torch.int64)
    for step in range(3):
        student, teacher = answers(Case("embed", {}, STUDENT, LARGER), 6)
        scaled = teacher.map(lambda tensor: 10.0**step * tensor)  # noqa: B023 (called at once)
        expected = plain(student, scaled, samples(labels_B))
        total = (expected["embedding"] + expected["map"]).mean().item()
        mean = total if step == 0 else 0.99 * mean + 0.01 * total
        found = balanced(student, scaled, samples(labels_B))
        for name in ("embedding", "map"):
            torch.testing.assert_close(found[name], expected[name] / mean)
    before, expected_grads = balanced.mean_loss.clone(), torch.autograd.grad(expected["map"].sum() / mean, student.features[1])
    torch.testing.assert_close(torch.autograd.grad(found["map"].sum(), student.features[1]), expected_grads)
    balanced(student, teacher.map(lambda tensor: tensor / 0), samples(labels_B))
    balanced.eval()(student, teacher, samples(labels_B))
    assert torch.equal(balanced.mean_loss, before)
    assert_ranks_equal_one(ranks, Case("embed", {"balance": True}, STUDENT, LARGER, steps=3), (5, 0, 2))


# Without labels


@pytest.mark.parametrize(
    ("name", "student", "teacher"),
    [("embed", STUDENT, LARGER), ("queue", STUDENT, LARGER), *((name, ((4,),), ((7,),)) for name in ("rkd", "cc", "sp"))],
)
def test_imitation_and_relations_need_neither_labels_nor_classes_nor_logits(name: str, student: Shapes, teacher: Shapes) -> None:
    unlabeled = torch.full((40,), -1)
    method = make(name, student_shapes=student, teacher_shapes=teacher, num_classes=0, labels_M=unlabeled)
    features = [ModelOutputs(None, outputs.features) for outputs in answers(Case(name, {}, student, teacher), 4)]
    terms = method(*features, samples(unlabeled[:4]))
    torch.stack([term.sum() for term in terms.values()]).sum().backward()
    for feature in features[0].features:
        assert feature.grad is not None
        assert feature.grad.count_nonzero()


def test_no_label_counts_where_only_features_are_imitated() -> None:
    assert all(load_method(name).task_weight == 0 and not load_method(name).requires.hard_labels for name in ("embed", "queue"))


# What is imitated, and what is not


@pytest.mark.parametrize("name", ["embed", "queue"])
@pytest.mark.parametrize(("off", "on", "at"), [("map", "embedding", 0), ("embedding", "map", 1)])
def test_a_term_of_weight_0_is_not_read_and_has_no_module(name: str, off: str, on: str, at: int) -> None:
    case = Case(name, {off: 0}, STUDENT[at : at + 1], LARGER[at : at + 1])
    method = case.make()
    assert method.options.student_taps == method.options.teacher_taps == (on,)
    assert all(parameter.startswith(f"heads.{on}.") for parameter, _ in method.named_parameters())
    terms = method(*answers(case, 3), samples(torch.zeros(3, dtype=torch.int64)))
    assert not terms[off].count_nonzero()
    assert terms[on].shape == (3,)
    assert terms[on].count_nonzero()


@pytest.mark.parametrize("name", ["embed", "queue"])
def test_weights_of_terms_are_in_them(name: str) -> None:
    single, weighted = (Case(name, options, STUDENT, LARGER) for options in ({}, {"embedding": 2, "map": 0.5}))
    found = [case.make()(*answers(case, 3), samples(torch.zeros(3, dtype=torch.int64))) for case in (single, weighted)]
    torch.testing.assert_close(found[1]["embedding"], 2 * found[0]["embedding"])
    torch.testing.assert_close(found[1]["map"], 0.5 * found[0]["map"])


def test_nothing_to_imitate_is_refused() -> None:
    with pytest.raises(ValidationError, match="embedding and map are both 0, which teaches nothing"):
        load_method("embed").Options.model_validate({"embedding": 0, "map": 0})


@pytest.mark.parametrize(
    ("student", "options", "says"),
    [
        (((4,),), {}, "distill.options.queue.student_taps: queue reads embedding (D,) and map (D, H, W), but"),
        (((5, 3, 4), (4,)), {}, "the student's taps are (5, 3, 4), (4,): name such taps, or set the weight of the other to 0"),
        (((5, 3, 4),), {"map": 0}, "queue reads embedding (D,), but"),
        ((), {}, "the student's taps are none"),
    ],
)
def test_taps_of_something_else_are_refused_in_one_line(student: Shapes, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        make("queue", student_shapes=student, teacher_shapes=LARGER[: 1 if options else 2], **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "teacher", "options", "resized"),
    [
        ("embed", SMALLER, {}, "student"),
        ("embed", LARGER, {}, "teacher"),
        ("embed", LARGER, {"resize": "student"}, "student"),
        ("queue", LARGER, {}, "student"),
        ("embed", STUDENT, {}, None),
    ],
)
def test_a_map_that_is_resized_is_a_notice(name: str, teacher: Shapes, options: dict[str, Any], resized: str | None) -> None:
    lines: list[str] = []
    with notices_to(lines.append):
        make(name, student_shapes=STUDENT, teacher_shapes=teacher, **options)
    sizes = "×".join(map(str, teacher[1][1:]))
    of_teacher = f"{name} compares the student's 3×4 map with the teacher's {sizes}"
    widths, *others = lines
    assert widths.startswith(f"distill.method: {name} projects the student's features to the teacher's: ")
    assert others == ([f"distill.method: {of_teacher}: it resizes the {resized}'s"] if resized else [])


# The queue


def entering(method: Method, rows_ND: torch.Tensor) -> None:
    embedding = torch.zeros(len(rows_ND), 4, dtype=torch.float64)
    method(ModelOutputs(None, (embedding,)), ModelOutputs(None, (rows_ND,)), samples(torch.full((len(rows_ND),), -1)))


def of_embeddings(queue_size: int | None = None, **more: Any) -> Queue:
    options = {"map": 0, "queue_size": queue_size}
    return cast(Queue, make("queue", student_shapes=STUDENT[:1], teacher_shapes=((2,),), **options, **more))


def directions(count: int, seed: int) -> torch.Tensor:
    rows = torch.randn(count, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows)


@pytest.mark.parametrize("batches", [(3, 3, 3, 3), (2, 7, 1), (5, 0, 5), (20, 1)])
def test_the_queue_holds_the_newest_rows(batches: tuple[int, ...]) -> None:
    method, entered = of_embeddings(5), []
    for seed, count in enumerate(batches):
        entering(method, directions(count, seed))
        entered += directions(count, seed).tolist()
        found = sorted(method.queue_QD[: len(entered)].tolist())
        np.testing.assert_allclose(found, sorted(entered[-5:]), rtol=1e-12)


def test_outside_training_nothing_enters_the_queue_and_an_empty_one_teaches_nothing() -> None:
    method = of_embeddings(5).eval()
    terms = method(*answers(Case("queue", {}, STUDENT[:1], ((2,),)), 3), samples(torch.full((3,), -1)))
    assert not terms["embedding"].count_nonzero()
    assert not method.queue_QD.count_nonzero()
    assert not method.num_entered


def test_a_resumed_queue_is_that_of_an_unbroken_one() -> None:
    unbroken, resumed = of_embeddings(5), of_embeddings(5)
    for seed in range(3):
        entering(unbroken, directions(3, seed))
        if seed == 1:
            resumed.load_state_dict(unbroken.state_dict())
    entering(resumed, directions(3, 2))
    assert resumed.queue_QD.equal(unbroken.queue_QD)


@pytest.mark.parametrize(("images", "rows"), [(5, 16), (40, 16), (128, 64), (1000, 256), (50_000, 8192), (1_281_167, 8192)])
def test_a_queue_has_as_many_rows_as_the_set_has_images_for(images: int, rows: int) -> None:
    assert len(of_embeddings(labels_M=torch.full((images,), -1)).queue_QD) == rows


def test_heads_of_a_queue_begin_with_a_deviation_of_2_percent() -> None:
    method = make("queue", student_shapes=((256,), (256, 2, 2)), teacher_shapes=((64,), (64, 2, 2)))
    for name in ("embedding", "map"):
        assert method.get_parameter(f"heads.{name}.weight").std().item() == pytest.approx(0.02, rel=0.05)


# Standardized features of the teacher


@pytest.mark.parametrize("kind", ["per_channel", "phi_s"])
def test_targets_are_standardized_by_what_the_method_was_calibrated_with(kind: str) -> None:
    case = Case("embed", {"standardize": kind, "loss": "mse", "layers": 1}, ((4,), (5, 2, 2)), ((8,), (12, 2, 2)))
    method = cast(Embed, case.make())
    seen = [answers(case, 20, seed=seed)[1] for seed in range(3)]
    for outputs in seen:
        method.calibrate(outputs)
    method.end_calibration()
    student, teacher = answers(case, 3, seed=1)
    found = method(student, teacher, samples(torch.full((3,), -1)))
    x_ND = torch.cat([outputs.features[0] for outputs in seen]).numpy()
    standardized = method.standardizers["embedding"](torch.as_tensor(x_ND)).numpy()
    np.testing.assert_allclose(standardized.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(standardized.var(0), 1, rtol=1e-12)
    projected = method.heads["embedding"](student.features[0]).detach().numpy()
    target = method.standardizers["embedding"](teacher.features[0]).numpy()
    np.testing.assert_allclose(found["embedding"].detach().numpy(), ((projected - target) ** 2).mean(1), rtol=1e-12)
