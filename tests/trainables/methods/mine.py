"""Methods as a user writes them, in a file of their own."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.config import LossOptimConfig, MethodOptions, Natural
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements


class SecondHead(Method):
    """A linear head of its own on a tapped feature, which has to tell the class after the right one."""

    terms = ("next",)
    taps = ("hidden.0",)
    requires = Requirements(teacher=False)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.head = nn.Linear(context.student.shapes[0][0], context.num_classes)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        logits_BK = self.head(student.features[0])
        return {"next": F.cross_entropy(logits_BK, (batch.labels_B + 1) % logits_BK.shape[1], reduction="none")}


class Rivals(Method):
    """A judge on a tapped feature learns to tell one class, and the student, against it, has it tell another."""

    terms = ("judge", "deceive")
    taps = ("hidden.0",)
    requires = Requirements(teacher=False)
    optimizers: ClassVar = {
        "judge": LossOptimConfig(lr=0.2, momentum=0.5, weight_decay=0.01),
        "deceive": LossOptimConfig(lr=0.02, momentum=0.3, schedule="constant"),
    }

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.head = nn.Linear(math.prod(context.student.shapes[0]), context.num_classes)

    def term_parameters(self, term: str, student: nn.Module) -> list[nn.Parameter]:
        return list(self.parameters() if term == "judge" else student.parameters())

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        logits_BK = self.head(student.features[0].flatten(1))
        wanted = zip(self.terms, (1, 2), strict=True)
        num_classes = logits_BK.shape[1]
        return {name: F.cross_entropy(logits_BK, (batch.labels_B + off) % num_classes, reduction="none") for name, off in wanted}


class PooledRivals(Rivals):
    """The same for a network with maps."""

    taps = ("pooled",)


class Alike(Method):
    """The distances of all samples of the global batch should be the teacher's; remembers how many it has seen."""

    terms = ("gram",)
    requires = Requirements(whole_batch=True)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.register_buffer("seen_M", torch.zeros(len(context.labels_M)))

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        mine_ND, theirs_ND = batch.all_gather(student.logits_BK), batch.all_gather(teacher.logits_BK)
        if self.training:
            assert isinstance(self.seen_M, Tensor)
            self.seen_M[batch.all_gather(batch.indices_B)] += 1
        return {"gram": (mine_ND @ mine_ND.T - theirs_ND @ theirs_ND.T).square().mean()}


class PreparedOptions(MethodOptions):
    init_epochs: Natural = 2


class Prepared(Method):
    """Learns to encode the teacher's logits in a stage before the training, then has the student imitate the code."""

    Options = PreparedOptions
    terms = ("code",)
    init_terms = ("kept",)

    def __init__(self, options: PreparedOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.encoder, self.decoder = nn.Linear(context.num_classes, 4), nn.Linear(4, context.num_classes)
        self.translator = nn.Linear(context.num_classes, 4)
        self.options = options

    def init_stage_parameters(self, student: nn.Module) -> list[nn.Parameter]:
        return self.init_only_parameters()

    def init_only_parameters(self) -> list[nn.Parameter]:
        return [*self.encoder.parameters(), *self.decoder.parameters()]

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"kept": (self.decoder(self.encoder(teacher.logits_BK)) - teacher.logits_BK).square().mean(1)}

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"code": (self.translator(student.logits_BK) - self.encoder(teacher.logits_BK)).square().mean(1)}


class Apart(Method):
    """The classic mistake: samples are compared with those of their own worker alone."""

    terms = ("gram",)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        mine_BK, theirs_BK = student.logits_BK, teacher.logits_BK
        return {"gram": (mine_BK @ mine_BK.T - theirs_BK @ theirs_BK.T).square().mean(1)}


class MendableOptions(MethodOptions):
    mended: bool = False


class Mendable(Alike):
    """Makes the classic mistake unless it is told not to."""

    Options = MendableOptions

    def __init__(self, options: MendableOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._mended = options.mended

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return super().forward(student, teacher, batch) if self._mended else Apart.forward(self, student, teacher, batch)  # type: ignore[arg-type]


class Forgetful(Method):
    """Trains a layer that its loss does not use, and names a term that it does not return."""

    terms = ("kept", "lost")

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.unused = nn.Linear(2, 2)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"kept": (student.logits_BK - teacher.logits_BK).square().mean(1)}


class Counting(Method):
    """Remembers in a plain attribute, which no checkpoint holds."""

    terms = ("apart",)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.calls = 0

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        self.calls += 1
        return {"apart": (student.logits_BK - self.calls * teacher.logits_BK).square().mean(1)}


class Rooted(Method):
    """A square root of a distance, whose gradient at 0 is not finite."""

    terms = ("distance",)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"distance": (student.logits_BK - teacher.logits_BK).square().sum(1).sqrt()}


class Slopes(Method):
    """The teacher's logits should change with its last map as a learned multiple of the student's do."""

    terms = ("slope",)
    taps = ("stage-1",)
    requires = Requirements(teacher_gradient=True)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        (theirs,) = torch.autograd.grad(teacher.logits_BK.square().sum(), teacher.features, retain_graph=True)
        (mine,) = torch.autograd.grad(student.logits_BK.square().sum(), student.features, create_graph=True)
        return {"slope": (self.scale * mine - theirs.detach()).square().flatten(1).sum(1)}


class Unsaid(Alike):
    """Gathers, and does not say so."""

    requires = Requirements()


class Unprepared(Prepared):
    """All mistakes are in its init stage: a name that it does not declare, rows of all workers, a root at zero."""

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        theirs_NK = batch.all_gather(teacher.logits_BK)
        off = self.decoder(self.encoder(theirs_NK)) - theirs_NK
        return {"zzz": (off * 0).square().sum().sqrt()}


class Gathering(Prepared):
    """Gathers in its init stage alone, and does not say so."""

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        theirs_NK = batch.all_gather(teacher.logits_BK)
        return {"kept": (self.decoder(self.encoder(theirs_NK)) - theirs_NK).square().mean()}


class HalfPrepared(Prepared):
    """Leaves out of its init stage's loss what it says to train there, and takes a root that may be one of zero."""

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        apart_BK = student.logits_BK.detach() - teacher.logits_BK
        return {"kept": (self.encoder.weight.square().sum() * apart_BK.square().sum(1)).sqrt()}


class Endless(Method):
    """Declares an init stage without a length."""

    terms = ("apart",)
    init_terms = ("kept",)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"apart": (student.logits_BK - teacher.logits_BK).square().mean(1)}
