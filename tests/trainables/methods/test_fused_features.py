"""Methods that fuse, project or attend: ofd, reviewkd, simkd, srrl, semckd."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainables.methods.against import teacher_model
from tests.trainables.methods.calls import make, samples
from tests.trainables.methods.references import features as reference
from tests.trainables.models.small_families import unchanged
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ExperimentError
from trainables.methods.contract import Method, ModelOutputs
from trainables.methods.ofd import margins, partial_distance
from trainables.methods.reviewkd import hierarchical_context_loss
from trainables.models.registry import build_model
from trainables.models.reused_classifier import ReusedClassifier
from trainables.models.tap_names import norms_before

STUDENT = ((3, 8, 8), (4, 4, 4), (6, 2, 2))
TEACHER = ((8, 8, 8), (16, 4, 4), (32, 2, 2))
ROWS, CLASSES = 8, 5
LABELS = torch.arange(ROWS) % CLASSES


KINDS: dict[str, dict[str, Any]] = {
    "ofd": {"student_shapes": STUDENT, "teacher_shapes": TEACHER},
    "reviewkd": {"student_shapes": (*STUDENT, (6,)), "teacher_shapes": (*TEACHER, (32,))},
    "simkd": {"student_shapes": ((32, 2, 2),), "teacher_shapes": ((32, 2, 2),)},
    "srrl": {"student_shapes": (STUDENT[-1],), "teacher_shapes": ((32,),)},
    "semckd": {"student_shapes": STUDENT[1:], "teacher_shapes": TEACHER},
}


def made(name: str, group: Group | None = None, **changed: Any) -> Method:
    return make(
        name,
        **{"teacher": teacher_model(), "num_classes": CLASSES, "global_batch_size": ROWS} | KINDS[name] | changed,
        group=group,
    )


def outputs_of(shapes: tuple[tuple[int, ...], ...], seed: int) -> ModelOutputs:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(ROWS, *shape, dtype=torch.float64, generator=generator) for shape in ((CLASSES,), *shapes)]
    return ModelOutputs(draw[0], tuple(draw[1:]))


def answers(name: str) -> tuple[ModelOutputs, ModelOutputs]:
    return outputs_of(KINDS[name]["student_shapes"], 3), outputs_of(KINDS[name]["teacher_shapes"], 4)


def part(whole: ModelOutputs, begin: int, end: int) -> ModelOutputs:
    return ModelOutputs(whole.logits_BK[begin:end], tuple(feature[begin:end] for feature in whole.features))


def learned(
    method: Method, student: ModelOutputs, teacher: ModelOutputs, labels_B: Tensor, total: int, group: Group | None = None
) -> Any:
    """The terms, and the gradients of the loss of a step: the student's features', and those of what the method trains."""
    leaves = [feature.clone().requires_grad_() for feature in student.features]
    terms = method(ModelOutputs(student.logits_BK, tuple(leaves)), teacher, samples(labels_B, group=group))
    assert tuple(terms) == method.terms
    ranks = 1 if group is None else group.world_size
    loss = sum(term if term.ndim == 0 else term.sum() * (ranks / max(total, 1)) for term in terms.values())
    parameters = [parameter for parameter in method.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, [*leaves, *parameters])
    return {name: term.detach() for name, term in terms.items()}, gradients[: len(leaves)], gradients[len(leaves) :]


# The formulas


def test_a_margin_is_the_mean_of_what_is_negative() -> None:
    scale, shift = torch.tensor([1.0, -2.0, 0.5, 1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, -0.3, 4.0, -2.0, 3.0])
    found = margins(scale, shift)
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        drawn = shift[number] + scale[number].abs() * torch.randn(2_000_000, dtype=torch.float64, generator=generator)
        assert found[number].item() == pytest.approx(drawn[drawn < 0].mean().item(), rel=5e-3)
    assert found[0].item() == pytest.approx(-math.sqrt(2 / math.pi))
    assert found[3:].tolist() == [-3.0, -2.0, 0.0]  # hardly ever negative; always the same


def test_the_partial_distance_requires_only_what_the_relu_lets_through_and_for_no_more_than_the_margin() -> None:
    margin = torch.tensor([-1.0], dtype=torch.float64)

    def distance(student: float, teacher: float) -> float:
        maps = (torch.full((1, 1, 1, 1), value, dtype=torch.float64) for value in (student, teacher))
        return partial_distance(*maps, margin).item()

    assert distance(0.5, 2.0) == 2.25  # below a target above 0
    assert distance(3.0, 2.0) == 1.0
    assert distance(1.0, -5.0) == 4.0  # above the margin
    assert distance(-0.5, -0.5) == distance(-4.0, -0.5) == distance(-4.0, -5.0) == 0.0


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        ("resnet18", ["layer1.1.bn2", "layer2.1.bn2", "layer3.1.bn2", "layer4.1.bn2"]),
        ("vgg11_bn", ["features.1", "features.5", "features.12", "features.19", "features.26"]),
        ("mobilenet_v2", [f"features.{block}.conv.{2 if block == 1 else 3}" for block in (1, 3, 6, 13, 17)]),
        ("convnext", [None, None]),
    ],
)
def test_the_norm_before_a_stages_last_activation_is_the_main_branchs(model: str, paths: list[str | None]) -> None:
    built = unchanged(model, 32)
    modules = {id(module): path for path, module in built.named_modules()}
    found = norms_before(built, ("stages.preact",), name=model, image_size=32)
    assert [None if norm is None else modules[id(norm)] for norm in found] == paths
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in built.modules())


def test_a_shortcuts_norm_is_not_taken_for_the_main_branchs() -> None:
    built = build_model("resnet18", num_classes=3, image_size=32, seed=0)
    (found,) = norms_before(built, ("layer2.0.relu:in",), name="resnet18", image_size=32)
    assert found is built.get_submodule("layer2.0.bn2")


def test_ofd_refuses_a_teacher_whose_batch_norm_is_not_found() -> None:
    with pytest.raises(ExperimentError, match=r"map 2 of 3 is not the output of a batch norm with scale and shift") as caught:
        made("ofd", teacher_taps=("features.1", "features.4", "features.9"))
    assert "\n" not in str(caught.value)


def test_hierarchical_context_loss_by_hand() -> None:
    student = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    student[0, 0, 0, 0] = 4.0
    # Mean squares: whole 1, at 2×2 one of four cells is 1, at 1×1 0.25.
    found = hierarchical_context_loss(student, torch.zeros_like(student))
    assert found.item() == pytest.approx((1 + 0.5 * 0.25 + 0.25 * 0.0625) / 1.75)
    vector = torch.full((1, 2, 1, 1), 3.0)
    assert hierarchical_context_loss(vector, torch.zeros_like(vector)).item() == 9.0


def test_review_knowledge_goes_from_deep_to_shallow() -> None:
    """The last level's loss depends on its own map alone, the first's on all."""
    method, (student, teacher) = made("reviewkd"), answers("reviewkd")
    _, gradients, _ = learned(method, student, teacher, LABELS, ROWS)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    near = ModelOutputs(teacher.logits_BK, (*(feature * 0 for feature in teacher.features[:-1]), teacher.features[-1]))
    with torch.no_grad():
        for fusion in list(method._fusions)[:-1]:  # type: ignore[arg-type, union-attr]
            fusion.widen[1].weight.zero_()
    _, gradients, _ = learned(method, student, near, LABELS, ROWS)
    assert [bool(gradient.abs().sum() > 0) for gradient in gradients] == [False, False, False, True]


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("srrl", {"teacher_shapes": ((32, 2, 2),)}, r"srrl.teacher_taps: srrl reads the teacher's classifier input, \(32,\)"),
        ("srrl", {"student_shapes": STUDENT}, "srrl.student_taps: srrl reads one map"),
        ("semckd", {"student_shapes": ((4,),)}, "semckd.student_taps: semckd reads 1 or more maps"),
        ("reviewkd", {"student_shapes": STUDENT}, "3 maps, the teacher 4"),
        ("simkd", {"student_shapes": ((16, 2, 2),)}, "the student's has 16 and the teacher's 32"),
        ("ofd", {"student_shapes": STUDENT[:2]}, "2 maps, the teacher 3"),
    ],
)
def test_models_that_do_not_fit_are_refused_in_one_line(name: str, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ExperimentError, match=says) as caught:
        made(name, **changed)
    assert "\n" not in str(caught.value)


# The independent references


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()


@pytest.mark.parametrize("size", [3, 2, 4])
def test_a_reused_classifier_projects_and_predicts_as_the_reference(size: int) -> None:
    """Of the maps that a student has, with the projector's batch norms in training mode."""
    model = build_model("convnet_small+convnet_small", num_classes=CLASSES, image_size=8, seed=0).double()
    assert isinstance(model, ReusedClassifier)
    model.reuse(teacher_model(), 8)
    images = torch.randn(ROWS, 3, 4 * size, 4 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    features = model.trunk.features.train()(images)  # type: ignore[operator, union-attr]
    target = outputs_of(((32, 2, 2),), 4).features[0]
    parts = [reference.Layer(array(m.weight), None, (array(n.weight), array(n.bias))) for m, n in projected(model)]
    head = (array(model.classifier.weight), array(model.classifier.bias))
    _, logits = reference.simkd(array(features), array(target), parts, head)
    np.testing.assert_allclose(array(model.train()(images)), logits, rtol=1e-9, atol=1e-12)


def projected(model: ReusedClassifier) -> Iterable[tuple[Any, Any]]:
    modules = list(model.projector)
    return zip(modules[0::3], modules[1::3], strict=True)


# Any number of workers


def whole_and_parts(group: Group, name: str, sizes: tuple[int, ...]) -> Any:
    """On each rank its terms and gradients, those of what the method trains averaged as DDP does."""
    torch.manual_seed(0)
    student, teacher = answers(name)
    begin = sum(sizes[: group.rank])
    end = begin + sizes[group.rank]
    method = made(name, group)
    terms, features, trained = learned(
        method, part(student, begin, end), part(teacher, begin, end), LABELS[begin:end], ROWS, group
    )
    if group.world_size > 1:
        for gradient in trained:
            torch.distributed.all_reduce(gradient)
    return terms, [g / group.world_size for g in features], [g / group.world_size for g in trained], method.state_dict()


@pytest.mark.parametrize("name", KINDS)
def test_three_workers_compute_what_one_does(ranks: RankPool, name: str) -> None:
    ((terms, features, trained, state),) = ranks.run(1, whole_and_parts, name, (ROWS,))
    parts = ranks.run(3, whole_and_parts, name, (5, 0, 3))
    exact = {"rtol": 1e-9, "atol": 1e-12}
    for term, value in terms.items():
        if value.ndim:
            torch.testing.assert_close(torch.cat([own[0][term] for own in parts]), value, **exact)
        else:
            assert all(torch.allclose(own[0][term], value, **exact) for own in parts)
    for number, gradient in enumerate(features):
        torch.testing.assert_close(torch.cat([own[1][number] for own in parts]), gradient, **exact)
    for own in parts:
        for own_gradient, gradient in zip(own[2], trained, strict=True):
            torch.testing.assert_close(own_gradient, gradient, **exact)
        for key, tensor in state.items():
            torch.testing.assert_close(own[3][key], tensor, **exact)
