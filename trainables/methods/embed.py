"""Feature imitation as in AM-RADIO: Ranzinger, Heinrich, Kautz and Molchanov 2024 (CVPR), "AM-RADIO: Agglomerative
Vision Foundation Model", equations 2 and 3.

One head projects the student's image embedding to the teacher's width, another one each position of its map. With cos the cosine
of two vectors and smooth L1 the mean over their values, the losses are

- `radio`: 1 − cos of the embeddings, and the mean over positions of 0.9·(1 − cos) + 0.1·(smooth L1);
- `unic`: ½·(1 − cos) + ½·(smooth L1) of both: Sariyildiz, Weinzaepfel, Lucas, Larlus and Kalantidis 2024 (ECCV), "UNIC";
- `mse`: the mean of the squared differences; `cosine`: 1 − cos; `normalized_mse`: ‖s/‖s‖ − t/‖t‖‖², as in BYOL.

A head has `layers` linear layers with layer norm and GELU between them. It is part of the method and not exported. Maps of
different sizes are compared at the smaller one. The teacher's features can be standardized first (`standardize_features`), with
a mean and covariance computed before the first step; `layer_norm` needs none.

With `balance` the loss is divided by its running mean, m ← 0.99·m + 0.01·(mean over the global batch), which starts as the first
batch's mean. The loss is then about 1, whatever the teacher's width and the scale of its features.

Shapes: B batch, D features, H W positions.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from trainables.config import Count
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements, mean_per_sample
from trainables.methods.features import unit
from trainables.methods.imitation import DIMENSIONS, ImitationOptions, channels_last, imitated_shapes, resizes
from trainables.methods.standardize_features import FeatureStandardizer

MOMENTUM = 0.99
"""Weight of the old value in the running mean of `balance`."""


def _cosine(student: Tensor, teacher: Tensor) -> Tensor:
    return 1 - (unit(student) * unit(teacher)).sum(-1)


def _smooth_l1(student: Tensor, teacher: Tensor) -> Tensor:
    return functional.smooth_l1_loss(student, teacher, reduction="none").mean(-1)


def _mixed(cosine: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda student, teacher: cosine * _cosine(student, teacher) + (1 - cosine) * _smooth_l1(student, teacher)


LOSSES: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "radio": {"embedding": _cosine, "map": _mixed(0.9)},
    "unic": dict.fromkeys(DIMENSIONS, _mixed(0.5)),
    "mse": dict.fromkeys(DIMENSIONS, lambda student, teacher: (student - teacher).square().mean(-1)),
    "cosine": dict.fromkeys(DIMENSIONS, _cosine),
    "normalized_mse": dict.fromkeys(DIMENSIONS, lambda student, teacher: (unit(student) - unit(teacher)).square().sum(-1)),
}
"""`loss` option → term → function of the student's and the teacher's (…, D) that returns (…)."""


class EmbedOptions(ImitationOptions):
    """AM-RADIO's losses and heads."""

    loss: Literal["radio", "unic", "mse", "cosine", "normalized_mse"] = Field(
        "radio", description="loss function, see trainables.methods.embed"
    )
    layers: Count = Field(2, description="linear layers of a head; 1: it is linear")
    hidden: Count | None = Field(None, description="width between a head's layers; absent: the teacher's")
    resize: Literal["larger", "student", "teacher"] = Field(
        "larger", description="whose map is interpolated to the size of the other's, where they differ"
    )
    standardize: Literal["none", "layer_norm", "per_channel", "phi_s"] = Field(
        "none", description="the teacher's features: over the channels of each vector, or by statistics of the training images"
    )
    standardize_images: Count = Field(10_000, description="training images for these statistics, an epoch at most")
    balance: bool = Field(
        False, description="divide the loss by its running mean, so that of several teachers each weighs by its share alone"
    )

    @property
    def calibration_images(self) -> int:
        return self.standardize_images if self.standardize in ("per_channel", "phi_s") else 0


class Embed(Method):
    """embedding·L(head(student's), teacher's) + map·(mean of L over positions), with L chosen by `loss`."""

    Options = EmbedOptions
    options: EmbedOptions
    terms = ("embedding", "map")
    taps = ("embedding", "map")
    requires = Requirements(logits=False)
    task_weight = 0.0
    mean_loss: Tensor

    def __init__(self, options: EmbedOptions, context: BuildContext) -> None:
        """Raises ExperimentError: the taps are not an embedding and a map."""
        super().__init__(options, context)
        self._group = context.group
        if options.balance:
            self.register_buffer("mean_loss", torch.zeros(()))  # 0 before the first step
        shapes = imitated_shapes("embed", options, context)
        self.heads, self.standardizers = nn.ModuleDict(), nn.ModuleDict()
        for name, ((inputs, *_), (outputs, *_)) in shapes.items():
            self.heads[name] = head(inputs, outputs, options.layers, options.hidden or outputs)
            if options.standardize in ("per_channel", "phi_s"):
                self.standardizers[name] = FeatureStandardizer(
                    options.standardize, outputs, seed=context.seed, where=f"distill.options.embed.standardize: {name}"
                )
        self.projects_embedding = "embedding" in shapes
        if "map" in shapes:
            self.resize_student, self.resize_teacher = resizes("embed", shapes["map"], options.resize)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `embedding` and `map` of each sample, (B,), multiplied by their weights."""
        found = dict.fromkeys(self.terms, student.features[0].new_zeros(len(batch.labels_B)))
        for (name, project), s, t in zip(self.heads.items(), student.features, teacher.features, strict=True):
            source, target = project(channels_last(s)), self._standardized(name, channels_last(t))
            if name == "map":
                source, target = self.resize_student(source), self.resize_teacher(target)
            loss = mean_per_sample(LOSSES[self.options.loss][name](source, target))
            found[name] = getattr(self.options, name) * loss
        if self.options.balance:
            if self.training:
                self._update_mean(batch.all_gather(torch.stack([*found.values()]).sum(0).detach()))
            found = {name: loss / self.mean_loss.clamp(min=torch.finfo(loss.dtype).eps) for name, loss in found.items()}
        return found

    def project_embedding(self, student: ModelOutputs, teacher: ModelOutputs) -> tuple[Tensor, Tensor]:
        return self.heads["embedding"](student.features[0]), self._standardized("embedding", teacher.features[0])

    def _update_mean(self, losses_N: Tensor) -> None:
        """Update the running mean, except in a step without images or with non-finite outputs, which fp16 skips."""
        if len(losses_N):
            mean = losses_N.mean()
            new = torch.where(self.mean_loss > 0, MOMENTUM * self.mean_loss + (1 - MOMENTUM) * mean, mean)
            self.mean_loss.copy_(torch.where(mean.isfinite(), new, self.mean_loss))

    def calibrate(self, teacher: ModelOutputs) -> None:
        for standardizer, feature in zip(self._standardizers, teacher.features, strict=True):
            standardizer.add(channels_last(feature).flatten(0, -2))

    def end_calibration(self) -> None:
        for standardizer in self._standardizers:
            standardizer.finish(self._group)

    @property
    def _standardizers(self) -> list[FeatureStandardizer]:
        return [each for each in self.standardizers.values() if isinstance(each, FeatureStandardizer)]

    def _standardized(self, name: str, target: Tensor) -> Tensor:
        if self.options.standardize == "layer_norm":
            return functional.layer_norm(target, target.shape[-1:])
        return self.standardizers[name](target) if name in self.standardizers else target


def head(inputs: int, outputs: int, layers: int, hidden: int) -> nn.Sequential:
    """Build `layers` linear layers on the last dimension, with layer norm and GELU between them."""
    widths = [inputs, *[hidden] * (layers - 1), outputs]
    modules: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
    for size, following in pairwise(widths[1:]):
        modules += [nn.LayerNorm(size), nn.GELU(), nn.Linear(size, following)]
    return nn.Sequential(*modules)
