"""What a step costs however few images it has: its passes timed on a single one, after the training.

Shapes: B=1 image, C channels, H=W pixels, K classes.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from trainables.models.registry import logits_and_aux
from trainables.step import Learner, losses, teacher_forward

_MOST_S, _ROUNDS = 0.3, 5


def one_image_ms(learner: Learner, model: nn.Module, image_size: int) -> float:
    """Milliseconds of the teacher's forward, the student's forward, the loss and the backward on one image of zeros.

    That is what launching the work takes where a device has next to nothing to do. The least of a few rounds, 0.3 s at most
    after the first. No communication: `model` is the bare student. Nothing of the training is changed: batch norms use
    their statistics, gradients are thrown away, and no random number is drawn.
    """
    parameter = next(model.parameters())
    on_gpu = parameter.device.type == "cuda"
    image_BCHW = torch.zeros((1, 3, image_size, image_size), device=parameter.device, dtype=parameter.dtype)
    label_B = torch.zeros(1, dtype=torch.int64, device=parameter.device)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def once() -> float:
        began_s = time.perf_counter()
        with learner.autocast():
            teacher_BK = teacher_forward(learner.teacher, image_BCHW).clone() if learner.teacher is not None else None
            student_BK, aux = logits_and_aux(model(image_BCHW))
        loss_B = losses(student_BK, aux, teacher_BK, label_B, learner.distill)["loss"]
        torch.autograd.grad(loss_B.sum(), learned, allow_unused=True)
        if on_gpu:
            torch.cuda.synchronize(parameter.device)
        return time.perf_counter() - began_s

    was_training, was_searching = model.training, torch.backends.cudnn.benchmark
    model.eval()
    torch.backends.cudnn.benchmark = False  # to search for the fastest convolution of this one shape takes longer than it
    try:
        once()
        took_s, until_s = [once()], time.perf_counter() + _MOST_S
        while len(took_s) < _ROUNDS and time.perf_counter() < until_s:
            took_s.append(once())
    finally:
        model.train(was_training)
        torch.backends.cudnn.benchmark = was_searching
    return 1e3 * min(took_s)
