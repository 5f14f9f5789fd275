"""Peers of a training step on one device: the best plain script, and the steps of three published training scripts.

They do per step what those scripts do, in code of our own. `…_step` gives a step on a batch that lies on the device, `…_train`
one that takes a batch. Models are the product's, the rest is torch's.
Shapes: B batch, C=3 channels, H W pixels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.plain import MEAN, STD, accuracy, kd_loss

Train = Callable[[Tensor, Tensor], None]
"""Takes images and labels, on the device."""


def plain_train(
    teacher: nn.Module,
    student: nn.Module,
    precision: str,
    *,
    teacher_ahead: bool = False,
) -> Train:
    """The step that an engineer writes who knows the craft: autocast, channels_last as the models are, fused SGD, a teacher in
    inference mode, nothing that waits for the device. The images are uint8, as they come from a loader.

    `teacher_ahead`: on a GPU the teacher's pass of the next batch runs beside the student's of this one, in a stream of its own.
    """
    device = next(student.parameters()).device
    half = precision == "bf16"
    scale, shift = (1 / (255 * STD)).to(device), (-MEAN / STD).to(device)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    loss_sum, hits = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)

    def teach(images: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=half), torch.inference_mode():
            return teacher(images)

    logits_of = _ahead(teach, device) if teacher_ahead and device.type == "cuda" else teach

    def train(images_BCHW: Tensor, labels_B: Tensor) -> None:
        images = torch.addcmul(shift, images_BCHW.float(), scale)
        teacher_logits = logits_of(images)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = student(images)
        loss = kd_loss(logits.float(), teacher_logits.float(), labels_B)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss_sum.add_(loss.detach())
        hits.add_((logits.detach().argmax(1) == labels_B).sum())

    return train


def plain_step(
    teacher: nn.Module, student: nn.Module, images_BCHW: Tensor, labels_B: Tensor, precision: str, **options: Any
) -> Callable[[], None]:
    """`plain_train` on one batch."""
    return partial(plain_train(teacher, student, precision, **options), images_BCHW, labels_B)


def _ahead(teach: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """The logits that the last call has begun; those of its own images it begins, and the next call waits for them."""
    side, begun = torch.cuda.Stream(device), list[Tensor]()

    def logits_of(images: Tensor) -> Tensor:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            begun.append(teach(images))
        images.record_stream(side)
        logits = begun.pop(0) if len(begun) > 1 else teach(images)
        logits.record_stream(current)
        return logits

    return logits_of


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """The step captured once as a CUDA graph, and replayed; its batch stays where it is."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_: Callable[[], None] = step) -> None:  # the step owns the memory that the graph reads
        graph.replay()

    return replay


class Meter:
    """A mean over images, of numbers or on the device."""

    def __init__(self) -> None:
        self.total: float | Tensor = 0.0
        self.count = 0

    def update(self, value: float | Tensor, n: int) -> None:
        self.total, self.count = self.total + value * n, self.count + n


def normalized(images_BCHW: Tensor) -> Tensor:
    """As the loaders of these scripts give images."""
    device = images_BCHW.device
    return ((images_BCHW.float() / 255 - MEAN.to(device)) / STD.to(device)).contiguous()


def torchvision_train(teacher: nn.Module, student: nn.Module, precision: str) -> Train:
    """A step as torchvision's classification reference trains, with a teacher added as its users add one: the images normalized
    by the loader, torch's default SGD and memory format, with `--amp` float16 and a scaler, loss and accuracies read each step.
    """
    device = next(student.parameters()).device
    amp = precision != "fp32"
    scaler = torch.amp.GradScaler(device.type, enabled=amp)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    meters = [Meter() for _ in range(3)]

    def train(images: Tensor, labels_B: Tensor) -> None:
        with torch.autocast(device.type, torch.float16, enabled=amp):
            with torch.no_grad():
                teacher_logits = teacher(images)
            logits = student(images)
            loss = kd_loss(logits, teacher_logits, labels_B)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        acc1, acc5 = accuracy(logits.detach(), labels_B)
        for meter, value in zip(meters, (loss, acc1, acc5), strict=True):
            meter.update(value.item(), len(labels_B))

    return train


def torchvision_step(
    teacher: nn.Module, student: nn.Module, images_BCHW: Tensor, labels_B: Tensor, precision: str
) -> Callable[[], None]:
    """`torchvision_train` on one batch."""
    return partial(torchvision_train(teacher, student, precision), normalized(images_BCHW), labels_B)


def repdistiller_step(teacher: nn.Module, student: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Callable[[], None]:
    """A step as RepDistiller's `train_distill` takes it for KD (Tian, Krishnan and Isola 2020): float32, the loss read in each
    step, accuracies added up on the device. Its models return features too, which costs no time and is left out.
    """
    images = normalized(images_BCHW)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    losses, top1, top5 = (Meter() for _ in range(3))

    def step() -> None:
        logits = student(images)
        with torch.no_grad():
            teacher_logits = teacher(images)
        loss = kd_loss(logits, teacher_logits, labels_B)
        acc1, acc5 = accuracy(logits.detach(), labels_B)
        losses.update(loss.item(), len(labels_B))
        top1.update(acc1, len(labels_B))
        top5.update(acc5, len(labels_B))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def torchdistill_step(teacher: nn.Module, student: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Callable[[], None]:
    """A step as torchdistill's image classification script takes it for KD (Matsubara 2021): float32, hooks bring both models'
    outputs to the loss, which is read in each step and checked to be finite.
    """
    images = normalized(images_BCHW)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    outputs: dict[str, Tensor] = {}
    student.register_forward_hook(lambda _, __, output: outputs.update(student=output))
    teacher.register_forward_hook(lambda _, __, output: outputs.update(teacher=output))
    losses = Meter()

    def step() -> None:
        with torch.no_grad():
            teacher(images)
        student(images)
        loss = kd_loss(outputs["student"], outputs["teacher"], labels_B)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.update(loss.item(), len(labels_B))
        if torch.isnan(loss) or torch.isinf(loss):
            raise ValueError(f"the loss is {loss}")
        outputs.clear()

    return step
