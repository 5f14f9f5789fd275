"""A method compared with its independent reference: the same inputs must give the same losses and gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.trainables.methods.calls import init_parameters, make, samples
from tests.trainables.methods.references.basic import Array, Ints, derivative
from trainables.methods.contract import Method, ModelOutputs
from trainables.models.registry import build_model

Terms = dict[str, Array] | dict[str, float] | dict[str, Array | float]
Shapes = tuple[tuple[int, ...], ...]

CLASSES = 5
LABELS = torch.tensor([0, 4, 2, 4, 1])


@dataclass(frozen=True)
class Inputs:
    """The inputs of a reference: logits and features of both models in float64, and the method's parameters by name."""

    labels_B: Ints
    student_BK: Array
    teacher_BK: Array
    student: list[Array]
    teacher: list[Array]
    parameters: dict[str, Array]
    before: Inputs | None = None

    @property
    def constant(self) -> Inputs:
        """The same before a derivative moved it: what the method takes as a constant."""
        return self.before or self


@dataclass(frozen=True)
class Comparison:
    """A method with its options, and a reference for its terms, per sample or as their mean."""

    name: str
    reference: Callable[[Inputs], Terms]
    options: dict[str, Any] = field(default_factory=dict)
    student_shapes: Shapes = ()
    teacher_shapes: Shapes = ()
    teacher: Callable[[], nn.Module] = nn.Identity
    rows: int = len(LABELS)
    batch: Callable[[list[Tensor]], dict[str, Any]] = lambda teacher: {}
    """What a batch has besides labels, from the teacher's outputs: images may replace a feature."""
    memory: dict[str, Array] = field(default_factory=dict)
    """What the method remembers at first, by the buffer's name."""

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    def make(self, dtype: torch.dtype = torch.float64) -> Method:
        """The method, none of its parameters a 0 or a 1 that would hide where it stands."""
        method = make(
            self.name,
            student_shapes=self.student_shapes,
            teacher_shapes=self.teacher_shapes,
            teacher=copy.deepcopy(self.teacher()).to(dtype),
            num_classes=CLASSES,
            global_batch_size=self.rows + 1,
            **self.options,
        )
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in method.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
            for name, remembered in self.memory.items():
                method.get_buffer(name).copy_(torch.from_numpy(remembered))
        return method.to(dtype)

    def of_equal_models(self) -> Comparison:
        """The same where the student's features are as the teacher's."""
        return dataclasses.replace(self, student_shapes=self.teacher_shapes)

    def answers(self, seed: int = 0) -> tuple[list[Array], list[Array]]:
        """Random logits, then features, of student and teacher."""
        numbers = np.random.default_rng(seed)
        shapes = [(CLASSES,), *self.student_shapes], [(CLASSES,), *self.teacher_shapes]
        student, teacher = ([numbers.normal(size=(self.rows, *shape)) for shape in side] for side in shapes)
        return student, teacher


Change = Callable[[Array], Array]


def _as_it_is(x: Array) -> Array:
    return x


def _first_is_zero(x: Array) -> Array:
    return np.concatenate([x[:1] * 0, x[1:]])


def _all_are_one(x: Array) -> Array:
    return np.repeat(x[:1], len(x), axis=0)


EDGES: dict[str, tuple[Change, Change]] = {
    "random": (_as_it_is, _as_it_is),
    "one sample": (lambda x: x[:1], lambda x: x[:1]),
    "two samples": (lambda x: x[:2], lambda x: x[:2]),
    "a student of zeros": (lambda x: x * 0, _as_it_is),
    "a teacher of zeros": (_as_it_is, lambda x: x * 0),
    "zeros": (lambda x: x * 0, lambda x: x * 0),
    "a zero among the student's": (_first_is_zero, _as_it_is),
    "a zero among the teacher's": (_as_it_is, _first_is_zero),
    "a student to whom all samples are one": (_all_are_one, _as_it_is),
    "a teacher to whom all samples are one": (_as_it_is, _all_are_one),
    "equal samples": (_all_are_one, _all_are_one),
    "equal models": (_as_it_is, _as_it_is),
}


def at_edge(case: Comparison, edge: str) -> tuple[Comparison, list[Array], list[Array]]:
    """What is compared, and the answers of student and teacher, the same ones for "equal models"."""
    if edge == "equal models":
        case = case.of_equal_models()
        _, teacher = case.answers()
        return case, [x.copy() for x in teacher], teacher
    student, teacher = case.answers()
    of_student, of_teacher = EDGES[edge]
    return case, [of_student(x) for x in student], [of_teacher(x) for x in teacher]


def all_terms(
    case: Comparison, method: Method, student: list[Tensor], teacher: list[Tensor], labels_B: Tensor
) -> dict[str, Tensor]:
    """All its terms, those of the init stage too."""
    batch = case.batch(teacher)
    outputs = [ModelOutputs(side[0], tuple(side[1:])) for side in (student, teacher)]
    found: dict[str, Tensor] = {}
    if method.init_terms:
        found |= method.init_loss(*outputs, samples(labels_B, **batch))
    if method.terms:
        found |= method(*outputs, samples(labels_B, **batch))
    assert tuple(found) == method.init_terms + method.terms
    assert all(term.shape in ((len(labels_B),), ()) for term in found.values())
    return found


def assert_as_the_reference(case: Comparison, student: list[Array], teacher: list[Array], labels_B: Tensor | None = None) -> None:
    """The terms to 1e-9 in float64; losses and gradients finite."""
    labels_B = LABELS[: len(student[0])] if labels_B is None else labels_B
    method, leaves = case.make(), [x.requires_grad_() for x in _tensors(student)]
    found = all_terms(case, method, leaves, _tensors(teacher), labels_B)
    expected = case.reference(_inputs(method, student, teacher, labels_B))
    assert set(found) == set(expected)
    for name, value in found.items():
        value = value if np.ndim(expected[name]) else value.mean()
        np.testing.assert_allclose(value.detach().numpy(), expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    _assert_moderate(_means_and_gradients(found, leaves, method), torch.float64)
    single = [_tensors(side, torch.float32) for side in (student, teacher)]
    _assert_moderate(loss_and_gradients(case, torch.float32, *single, labels_B), torch.float32)


def assert_finite(case: Comparison, student: list[Array], teacher: list[Array], labels_B: Tensor | None = None) -> None:
    """Losses and gradients in float64 and float32; no gradient is far beyond the inputs' size."""
    labels_B = LABELS[: len(student[0])] if labels_B is None else labels_B
    for dtype in (torch.float64, torch.float32):
        found = loss_and_gradients(case, dtype, _tensors(student, dtype), _tensors(teacher, dtype), labels_B)
        _assert_moderate(found, dtype)


def _assert_moderate(found: list[Tensor], dtype: torch.dtype) -> None:
    for tensor in found:
        assert tensor.dtype == dtype
        assert (tensor.abs() < 1e7).all()


def loss_and_gradients(
    case: Comparison, dtype: torch.dtype, student: list[Tensor], teacher: list[Tensor], labels_B: Tensor
) -> list[Tensor]:
    """The terms' means, then the gradients of their sum that there are: of the student's answers and of the parameters."""
    method, leaves = case.make(dtype), [x.clone().requires_grad_() for x in student]
    return _means_and_gradients(all_terms(case, method, leaves, teacher, labels_B), leaves, method)


def _means_and_gradients(found: dict[str, Tensor], leaves: list[Tensor], method: Method) -> list[Tensor]:
    means = [term.mean() if term.ndim else term for term in found.values()]
    gradients = torch.autograd.grad(torch.stack(means).sum(), [*leaves, *method.parameters()], allow_unused=True)
    assert any(gradient is not None for gradient in gradients)
    return [*(mean.detach() for mean in means), *(gradient for gradient in gradients if gradient is not None)]


def assert_gradients_are_the_references(case: Comparison, directions: int = 3) -> None:
    """Of the student's answers and of what each stage trains, along random directions in each tensor, to 1e-5."""
    method, (student, teacher), labels_B = case.make(), case.answers(), LABELS[: case.rows]
    inputs, settled = _inputs(method, student, teacher, labels_B), init_parameters(method)
    numbers = np.random.default_rng(1)
    for names, warming in ((method.init_terms, True), (method.terms, False)):
        if not names:
            continue
        trained = {name: parameter for name, parameter in method.named_parameters() if (parameter in settled) == warming}
        leaves = [*(x.requires_grad_() for x in _tensors(student)), *trained.values()]
        found = all_terms(case, method, leaves[: len(student)], _tensors(teacher), labels_B)
        loss = torch.stack([found[name].mean() for name in names]).sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        arrays = [leaf.detach().numpy().copy() for leaf in leaves]
        for number, (array, gradient) in enumerate(zip(arrays, gradients, strict=True)):
            ways = numbers.normal(size=(directions, *array.shape)) / np.sqrt(array.size)

            def moved(steps: Array, number: int = number, ways: Array = ways) -> float:
                now = [x + np.tensordot(steps, ways, 1) if at == number else x for at, x in enumerate(arrays)]  # noqa: B023
                own = dict(zip(trained, now[len(student) :], strict=True))  # noqa: B023
                shifted = dataclasses.replace(
                    inputs,
                    student_BK=now[0],
                    student=now[1 : len(student)],
                    parameters={**inputs.parameters, **own},
                    before=inputs,
                )
                terms = case.reference(shifted)
                return float(sum(np.mean(terms[name]) for name in names))  # noqa: B023

            numeric = derivative(moved, np.zeros(directions))
            analytic = [0.0] * directions if gradient is None else [float((gradient.numpy() * way).sum()) for way in ways]
            size = max(1.0, abs(float(loss.detach())))
            np.testing.assert_allclose(analytic, numeric, rtol=1e-5, atol=1e-8 * size, err_msg=f"{names} by leaf {number}")


def assert_half_precision_is_near(case: Comparison) -> None:
    """In float32 gradients are within 2 % of float64's; answers rounded to bf16 and fp16 change no term by more than 2 %.

    All stays finite at the greatest sizes that fp16 holds.
    """
    student, teacher = case.answers()
    method, labels_B = case.make(), LABELS[: case.rows]
    terms = len(method.init_terms + method.terms)

    def found(dtype: torch.dtype, scale: float = 1.0, wide: torch.dtype = torch.float32) -> list[Tensor]:
        sides = ([(scale * torch.as_tensor(x)).to(dtype).to(wide) for x in side] for side in (student, teacher))
        return loss_and_gradients(case, wide, *sides, labels_B)

    exact, single = found(torch.float64, wide=torch.float64), found(torch.float32)
    largest = max(float(gradient.norm()) for gradient in exact[terms:])
    for one, other in zip(exact, single, strict=True):
        assert (one - other).norm() <= 0.02 * one.norm() + 1e-6 * largest  # some have no gradient but by rounding
    for dtype in (torch.bfloat16, torch.float16):
        near = found(dtype)
        for mean, full in zip(near[:terms], single[:terms], strict=True):
            assert abs(float(mean - full)) <= 0.02 * abs(float(full)), (dtype, float(mean), float(full))
        assert all(tensor.isfinite().all() for tensor in (*near, *found(dtype, scale=1e4)))


def assert_a_batch_may_be_empty(case: Comparison) -> None:
    """As it is on a rank that has no rows of a last batch: finite terms, and no gradients but 0."""
    student, teacher = ([torch.as_tensor(x[:0]) for x in side] for side in case.answers())
    leaves, method = [x.requires_grad_() for x in student], case.make()
    terms = all_terms(case, method, leaves, teacher, LABELS[:0])
    assert all(term.isfinite().all() for term in terms.values())
    torch.stack([term.sum() for term in terms.values()]).sum().backward()
    assert all(not x.grad.count_nonzero() for x in (*leaves, *method.parameters()) if x.grad is not None)


@cache
def teacher_model() -> nn.Module:
    """Three stages of 8, 16 and 32 channels for images of 8 pixels, its batch norms not fresh."""
    model = build_model("convnet_small", num_classes=5, image_size=8, seed=1)
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data = torch.randn(module.num_features, generator=generator)
            module.bias.data = torch.randn(module.num_features, generator=generator)
    return model.double().eval().requires_grad_(False)


def _tensors(arrays: list[Array], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.as_tensor(array).to(dtype, copy=True) for array in arrays]


def _inputs(method: Method, student: list[Array], teacher: list[Array], labels_B: Tensor) -> Inputs:
    parameters = {name: parameter.detach().numpy().copy() for name, parameter in method.named_parameters()}
    return Inputs(labels_B.numpy(), student[0], teacher[0], student[1:], teacher[1:], parameters)
