"""Evaluate the checkpoints of a stage outside of its workers: as `evaluate_epoch` does, with the same numbers."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.device.compilation import Compilation, compile_model
from trainables.device.tensor_format import autocast, pixels_of, tensor_format
from trainables.distributed.group import Group
from trainables.engine import checkpoint
from trainables.engine.evaluate import evaluate, evaluate_averaged, logits_of
from trainables.engine.features import val_loader
from trainables.engine.modules import build_student
from trainables.engine.weight_average import WeightAverage
from trainables.metrics.heartbeat import Heartbeat
from trainables.models.model_input import trained_model_input
from trainables.models.pixels import take_pixels
from trainables.rules import replica_batch


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    val: dict[str, float]
    """See `evaluate_averaged`."""
    skipped: dict[int, str]
    """See `Loader.skipped`."""


class CheckpointEvaluation:
    """The student and the validation images of a stage, for checkpoints of any of its epochs.

    Batches have as many images as one of the stage's workers has, so that one worker's evaluation gives the same bits.
    """

    def __init__(self, config: TrainConfig, device: torch.device, heartbeat: Heartbeat) -> None:
        """`config` is that of the stage's job, with its precision. Raises DataError: the data cannot be read."""
        self._group, self._heartbeat = Group(device=device), heartbeat
        data = config.data.model_copy(update={"global_batch_size": replica_batch(config)})
        self._loader = val_loader(data, "val", self._group)
        _, self._student = build_student(config, self._group, len(self._loader.source.classes))
        take_pixels(self._student, trained_model_input(config))
        self._student.to(tensor_format(config)[0])
        compile_model(self._student, config.train.compile)
        decay = config.optim.ema_decay
        self._average = None if decay is None else WeightAverage(self._student, nn.ModuleDict(), decay)
        precision = autocast(config.precision, device)
        self._logits = logits_of(self._student, pixels_of(config), precision, Compilation.of(config))

    def __call__(self, path: Path, step: int) -> Evaluation:
        """Evaluate the checkpoint of `step`. Raises DistillError: it cannot be read, or too many images cannot."""
        checkpoint.load_student(path, step, self._student, self._average)
        self._heartbeat.enter("eval")

        def measure() -> dict[str, float]:
            batches = self._heartbeat.over(self._loader.epoch(0))
            return evaluate(self._student, batches, self._logits, self._group, self._group)

        return Evaluation(evaluate_averaged(measure, self._average), self._loader.skipped)
