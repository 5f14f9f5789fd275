"""What a step costs however few images it has: its passes timed on a single one, after the training.

Shapes: B images, C channels, H=W pixels, K classes.
"""

from __future__ import annotations

import time

import torch

from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.engine.step import TrainState, losses
from trainables.methods.contract import MethodBatch

_MOST_S, _ROUNDS = 0.2, 3
_FURTHER = 16
"""Images beside the first, on a CPU. On a GPU few images cost nothing that could be measured: it is not full."""


def single_image_latency(train_state: TrainState, image_size: int) -> dict[str, float]:
    """`one_image_ms`: the teacher's forward, the student's forward, the loss and the backward on one image of zeros.

    That is what launching the work takes where a device has next to nothing to do. On a CPU also `further_image_ms`, what each
    image beside the first adds. The least of a few rounds each, 0.2 s at most after the first. No communication: the student and
    its methods are run without DDP, as if this rank were alone. Nothing of the training is changed: batch norms use their
    statistics, gradients are thrown away, and no random number is drawn.
    """
    model = train_state.distillation_module
    was_training, was_searching = model.training, torch.backends.cudnn.benchmark
    model.eval()
    torch.backends.cudnn.benchmark = False  # to search for the fastest convolution of this one shape takes longer than it
    try:
        one_s = _least_s(train_state, image_size, 1)
        found = {"one_image_ms": 1e3 * one_s}
        if train_state.group.device.type == "cpu":
            found["further_image_ms"] = 1e3 * (_least_s(train_state, image_size, 1 + _FURTHER) - one_s) / _FURTHER
        return found
    finally:
        model.train(was_training)
        torch.backends.cudnn.benchmark = was_searching


def _least_s(train_state: TrainState, image_size: int, num_images: int) -> float:
    """Seconds of the passes on so many images."""
    device, dtype = train_state.group.device, next(train_state.distillation_module.parameters()).dtype
    images_BCHW = torch.zeros((num_images, 3, image_size, image_size), device=device, dtype=dtype)
    labels_B = torch.zeros(num_images, dtype=torch.int64, device=device)
    learned = [parameter for parameter in train_state.distillation_module.parameters() if parameter.requires_grad]
    alone = MethodBatch(images_BCHW, labels_B, labels_B, 0.0, Gather(num_images, Group(device=device)))
    weights, one = train_state.distillation_module.weights(0.0), torch.ones((), device=device)

    def once() -> float:
        began_s = time.perf_counter()
        with train_state.autocast():
            taught = train_state.teacher(images_BCHW, num_images) if train_state.teacher is not None else None
            answer = train_state.distillation_module(images_BCHW, alone, taught)
        loss = losses(answer, labels_B, None, weights)
        torch.autograd.grad(loss.total(one), learned, allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began_s

    once()
    took_s, until_s = [once()], time.perf_counter() + _MOST_S
    while len(took_s) < _ROUNDS and time.perf_counter() < until_s:
        took_s.append(once())
    return min(took_s)
