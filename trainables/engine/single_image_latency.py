"""The latency of a step's passes on a single image, timed after the training.

Shapes: B images, C channels, H=W pixels, K classes.
"""

from __future__ import annotations

import time

import torch

from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.engine.step import TrainState, losses
from trainables.methods.contract import MethodBatch

_MAX_SECONDS, _ROUNDS = 0.2, 3
_NUM_FURTHER = 16
"""Images after the first, on a CPU. A GPU is not full with so few, so that they cost nothing that could be measured."""


def single_image_latency(train_state: TrainState, image_size: int) -> dict[str, float]:
    """`one_image_ms`: the teacher's forward, the student's forward, the loss and the backward on one image of zeros.

    That is how long launching the work takes where a device has next to nothing to compute. On a CPU also `further_image_ms`,
    what each image after the first adds. The least of a few rounds each, 0.2 s at most after the first. No communication: the
    student and its methods run without DDP, as if this rank was the only one. The training is not changed: batch norms use
    their statistics, gradients are thrown away, and no random number is drawn.
    """
    model = train_state.distillation_module
    was_training, was_benchmarking = model.training, torch.backends.cudnn.benchmark
    model.eval()
    torch.backends.cudnn.benchmark = False  # to search for the fastest convolution of this one shape takes longer than it
    try:
        one_s = _shortest_s(train_state, image_size, 1)
        found = {"one_image_ms": 1e3 * one_s}
        if train_state.group.device.type == "cpu":
            found["further_image_ms"] = 1e3 * (_shortest_s(train_state, image_size, 1 + _NUM_FURTHER) - one_s) / _NUM_FURTHER
        return found
    finally:
        model.train(was_training)
        torch.backends.cudnn.benchmark = was_benchmarking


def _shortest_s(train_state: TrainState, image_size: int, num_images: int) -> float:
    """Seconds of the passes on so many images."""
    device, dtype = train_state.group.device, next(train_state.distillation_module.parameters()).dtype
    images_BCHW = torch.zeros((num_images, 3, image_size, image_size), device=device, dtype=dtype)
    labels_B = torch.zeros(num_images, dtype=torch.int64, device=device)
    trained = [parameter for parameter in train_state.distillation_module.parameters() if parameter.requires_grad]
    batch = MethodBatch(images_BCHW, labels_B, labels_B, 0.0, Gather(num_images, Group(device=device)))
    weights, one = train_state.distillation_module.weights(0.0), torch.ones((), device=device)

    def once() -> float:
        start_s = time.perf_counter()
        with train_state.autocast():
            teacher_outputs = train_state.teacher(images_BCHW, num_images) if train_state.teacher is not None else None
            outputs = train_state.distillation_module(images_BCHW, batch, teacher_outputs)
        loss = losses(outputs, labels_B, None, weights)
        torch.autograd.grad(loss.total(one), trained, allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start_s

    once()
    times_s, until_s = [once()], time.perf_counter() + _MAX_SECONDS
    while len(times_s) < _ROUNDS and time.perf_counter() < until_s:
        times_s.append(once())
    return min(times_s)
