"""Pseudo-classes from a queue of the teacher's embeddings, as in LightlyTrain's default distillation. The queue is SEED's:
Fang, Wang, Wang, Zhang, Yang and Liu 2021 (ICLR), "SEED: Self-supervised Distillation for Visual Representation", section 3.

Its rows q are the teacher's latest embeddings of training images, each with norm 1. They are the weights of a classifier, whose
classes student and teacher should predict equally. With v an embedding of norm 1, the terms are

- `embedding`: KL(softmax(v_teacher·q/τ) ‖ softmax(v_student·q/τ));
- `map`: the same for each position, with all positions of its image in place of q, averaged over positions.

A linear head projects the student's features to the teacher's width; its map is then interpolated to the size of the teacher's.
A batch enters the queue before the loss, in the order of the global batch, so that all workers have the same queue, while
LightlyTrain's workers have one each. Unfilled rows are not classes. LightlyTrain mixes images (`data.device_augment.mixup: 1`).

Shapes: B batch of this rank, N of the global batch, D features, H W positions, L of them, Q rows of the queue.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from trainables.config import Count, Positive
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import unit
from trainables.methods.imitation import ImitationOptions, channels_last, imitated_shapes, resizes

MIN_BITS, MAX_BITS = 4, 13
"""A queue without a set size has from 16 to 8192 rows."""


class QueueOptions(ImitationOptions):
    """LightlyTrain's defaults: τ = 0.07, both weights 1."""

    temperature: Positive = Field(0.07, description="τ of the embeddings' products")
    map_temperature: Positive = Field(0.07, description="τ of the products of positions")
    queue_size: Count | None = Field(
        None, description="rows of the queue; absent: the largest power of 2 up to half the images, from 16 to 8192"
    )


class Queue(Method):
    """embedding·KL of the similarities with a queue of the teacher's embeddings + map·KL of those among an image's positions."""

    Options = QueueOptions
    options: QueueOptions
    terms = ("embedding", "map")
    taps = ("embedding", "map")
    requires = Requirements(logits=False, whole_batch=True)
    task_weight = 0.0
    queue_QD: Tensor
    num_entered: Tensor

    def __init__(self, options: QueueOptions, context: BuildContext) -> None:
        """Create the queue (Q, D), which is saved in the checkpoint and lies on the device.

        Raises ExperimentError: the taps are not an embedding and a map.
        """
        super().__init__(options, context)
        shapes = imitated_shapes("queue", options, context)
        self.heads = nn.ModuleDict({name: nn.Linear(student[0], teacher[0]) for name, (student, teacher) in shapes.items()})
        for head in self.heads.values():
            nn.init.trunc_normal_(head.weight, std=0.02)  # type: ignore[arg-type]
        if "embedding" in shapes:
            rows = options.queue_size or 2 ** min(max((len(context.labels_M) // 2).bit_length() - 1, MIN_BITS), MAX_BITS)
            self.register_buffer("queue_QD", torch.zeros(rows, shapes["embedding"][1][0]))
            self.register_buffer("num_entered", torch.zeros((), dtype=torch.int64))
        self.projects_embedding = "embedding" in shapes
        if "map" in shapes:
            self.resize, _ = resizes("queue", shapes["map"], "student")

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `embedding` and `map` of each sample, (B,), multiplied by their weights."""
        found = dict.fromkeys(self.terms, student.features[0].new_zeros(len(batch.labels_B)))
        for (name, head), s, t in zip(self.heads.items(), student.features, teacher.features, strict=True):
            source, target = head(channels_last(s)), unit(channels_last(t))
            loss = self._of_queue if name == "embedding" else self._of_positions
            found[name] = getattr(self.options, name) * loss(source, target, batch)
        return found

    def project_embedding(self, student: ModelOutputs, teacher: ModelOutputs) -> tuple[Tensor, Tensor]:
        return self.heads["embedding"](student.features[0]), teacher.features[0]

    def _of_queue(self, student_BD: Tensor, teacher_BD: Tensor, batch: MethodBatch) -> Tensor:
        rows_ND = batch.all_gather(teacher_BD)
        if self.training:
            self._enter(rows_ND)
        empty_Q = torch.arange(len(self.queue_QD), device=rows_ND.device) >= self.num_entered
        student_BQ, teacher_BQ = (
            (v_BD @ self.queue_QD.T / self.options.temperature).masked_fill(empty_Q, torch.finfo(v_BD.dtype).min)
            for v_BD in (unit(student_BD), teacher_BD)
        )
        return _kl(teacher_BQ, student_BQ)

    def _of_positions(self, student_BHWD: Tensor, teacher_BHWD: Tensor, batch: MethodBatch) -> Tensor:
        student_BLD, teacher_BLD = (v.flatten(1, 2) for v in (unit(self.resize(student_BHWD)), teacher_BHWD))
        student_BLL, teacher_BLL = (v @ v.transpose(1, 2) / self.options.map_temperature for v in (student_BLD, teacher_BLD))
        return _kl(teacher_BLL, student_BLL).mean(1)

    def _enter(self, rows_ND: Tensor) -> None:
        """Replace the oldest rows; if there are more new rows than the queue has, only the last ones are stored."""
        size = len(self.queue_QD)
        positions_N = (self.num_entered + torch.arange(len(rows_ND), device=rows_ND.device)) % size
        self.queue_QD.index_copy_(0, positions_N[-size:], rows_ND[-size:])
        self.num_entered += len(rows_ND)


def _kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute KL(softmax(teacher) ‖ softmax(student)) over the last dimension."""
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
