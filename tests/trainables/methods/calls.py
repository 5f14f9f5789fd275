"""A method by itself: built for shapes, called with tensors."""

from typing import Any

import torch
from torch import Tensor, nn

from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, ModelSpec
from trainables.methods.registry import load_method
from trainables.models.forward import seeded
from trainables.models.model_input import ModelInput


def make(
    name: str,
    *,
    student_shapes: tuple[tuple[int, ...], ...] = (),
    teacher_shapes: tuple[tuple[int, ...], ...] = (),
    student: nn.Module | None = None,
    teacher: nn.Module | None = None,
    num_classes: int = 5,
    labels_M: Tensor | None = None,
    group: Group | None = None,
    global_batch_size: int = 8,
    seed: int = 0,
    epochs: int = 10,
    init_stage: bool = True,
    **options: Any,
) -> Method:
    """The method in float64, in training mode, nothing frozen. Without models it is built for an empty one on either side."""
    kind = load_method(name)
    labels_M = torch.arange(40) % num_classes if labels_M is None else labels_M
    sides = ModelSpec(student or nn.Identity(), student_shapes), ModelSpec(teacher or nn.Identity(), teacher_shapes)
    context = BuildContext(
        *sides,
        num_classes=num_classes,
        labels_M=labels_M,
        input=ModelInput(8, (0.0,) * 3, (1.0,) * 3),
        global_batch_size=global_batch_size,
        seed=seed,
        epochs=epochs,
        group=group or Group(),
        init_stage=init_stage,
    )
    with seeded(f"test/{name}/{seed}"):
        return kind(kind.Options.model_validate(options), context).double().train()


def init_parameters(method: Method) -> set[nn.Parameter]:
    """What of the method's own is trained in its init stage alone."""
    if not method.init_terms or not method.terms:
        return set(method.parameters() if method.init_terms else ())
    return set(method.init_stage_parameters(nn.Identity()))


def samples(
    labels_B: Tensor,
    *,
    indices_B: Tensor | None = None,
    images_BCHW: Tensor | None = None,
    epoch: float = 0.0,
    group: Group | None = None,
) -> MethodBatch:
    """A batch with these labels; its indices are 0, 1, … where none are given, its images blank."""
    rows = len(labels_B)
    return MethodBatch(
        torch.zeros(rows, 3, 8, 8, dtype=torch.float64) if images_BCHW is None else images_BCHW,
        labels_B,
        torch.arange(rows) if indices_B is None else indices_B,
        epoch,
        Gather(rows, group or Group()),
    )


def terms(
    method: Method, student: Tensor | ModelOutputs, teacher: Tensor | ModelOutputs, labels_B: Tensor, **batch: Any
) -> dict[str, Tensor]:
    """What the method says; logits alone may stand for all that a model answered."""
    both = (answer if isinstance(answer, ModelOutputs) else ModelOutputs(answer) for answer in (student, teacher))
    found: dict[str, Tensor] = method(*both, samples(labels_B, **batch))
    return found
