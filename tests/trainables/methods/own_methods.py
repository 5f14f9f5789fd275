"""Methods as a user writes them, in a file of their own: some correct, some with a usual mistake."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.config import InitStageOptions, MethodOptions, Natural
from trainables.distributed.batch_norm import GlobalBatchNorm1d
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements


class SecondHead(Method):
    """A linear head of its own on a tapped feature, which learns to predict the class after the right one."""

    terms = ("next",)
    taps = ("hidden.0",)
    requires = Requirements(teacher=False)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.head = nn.Linear(context.student.shapes[0][0], context.num_classes)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        logits_BK = self.head(student.features[0])
        return {"next": F.cross_entropy(logits_BK, (batch.labels_B + 1) % logits_BK.shape[1], reduction="none")}


class TwoTerms(Method):
    """A head on a tapped feature that learns to predict two classes at once, by one term each."""

    terms = ("next", "second")
    taps = ("hidden.0",)
    requires = Requirements(teacher=False)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.head = nn.Linear(math.prod(context.student.shapes[0]), context.num_classes)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        logits_BK = self.head(student.features[0].flatten(1))
        num_classes = logits_BK.shape[1]
        targets = {name: (batch.labels_B + offset) % num_classes for name, offset in zip(self.terms, (1, 2), strict=True)}
        return {name: F.cross_entropy(logits_BK, target_B, reduction="none") for name, target_B in targets.items()}


class PooledTwoTerms(TwoTerms):
    """The same for a network with maps."""

    taps = ("pooled",)


class GlobalGram(Method):
    """The Gram matrix of the logits of the global batch should be the teacher's; counts how often each sample was trained on."""

    terms = ("gram",)
    requires = Requirements(whole_batch=True)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.register_buffer("counts_M", torch.zeros(len(context.labels_M)))

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        student_NK, teacher_NK = batch.all_gather(student.logits_BK), batch.all_gather(teacher.logits_BK)
        if self.training:
            assert isinstance(self.counts_M, Tensor)
            self.counts_M[batch.all_gather(batch.indices_B)] += 1
        return {"gram": (student_NK @ student_NK.T - teacher_NK @ teacher_NK.T).square().mean()}


class CodeOptions(InitStageOptions):
    init_epochs: Natural = 2


class InitStage(Method):
    """An init stage trains an autoencoder of the teacher's logits; then the student learns to predict their code."""

    Options = CodeOptions
    terms = ("code",)
    init_terms = ("reconstruction",)

    def __init__(self, options: CodeOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.encoder, self.decoder = nn.Linear(context.num_classes, 4), nn.Linear(4, context.num_classes)
        self.translator = nn.Linear(context.num_classes, 4)
        if not context.init_stage:
            self.encoder.requires_grad_(False)
            self.decoder.requires_grad_(False)

    def init_stage_parameters(self, student: nn.Module) -> list[nn.Parameter]:
        return [*self.encoder.parameters(), *self.decoder.parameters()]

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"reconstruction": (self.decoder(self.encoder(teacher.logits_BK)) - teacher.logits_BK).square().mean(1)}

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"code": (self.translator(student.logits_BK) - self.encoder(teacher.logits_BK)).square().mean(1)}


class LocalGram(Method):
    """The classic mistake: samples are compared with those of their own worker alone."""

    terms = ("gram",)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        student_BK, teacher_BK = student.logits_BK, teacher.logits_BK
        return {"gram": (student_BK @ student_BK.T - teacher_BK @ teacher_BK.T).square().mean(1)}


class EitherGramOptions(MethodOptions):
    over_all_workers: bool = False


class EitherGram(GlobalGram):
    """Makes the classic mistake unless an option says otherwise."""

    Options = EitherGramOptions

    def __init__(self, options: EitherGramOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._over_all_workers = options.over_all_workers

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return (
            super().forward(student, teacher, batch)
            if self._over_all_workers
            else LocalGram.forward(self, student, teacher, batch)
        )  # type: ignore[arg-type]


class MissingTerm(Method):
    """Trains a layer that its loss does not use, and names a term that it does not return."""

    terms = ("distance", "absent")

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.unused = nn.Linear(2, 2)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"distance": (student.logits_BK - teacher.logits_BK).square().mean(1)}


class UndeclaredScalar(Method):
    """A mean of its rank's micro-batch, which would count once for each of them."""

    terms = ("distance",)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"distance": (student.logits_BK - teacher.logits_BK).square().mean()}


class Counting(Method):
    """Counts in a plain attribute, which is not in a checkpoint."""

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


class ReadsAfterAll(Method):
    """Declares that it reads no logits, and reads them."""

    terms = ("apart",)
    taps = ("pooled",)
    requires = Requirements(logits=False)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        return {"apart": (student.logits_BK - teacher.logits_BK).square().mean(1)}


class UndeclaredNorm(Method):
    """A batch norm of the global batch without `Requirements.whole_batch`."""

    terms = ("apart",)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.norm = GlobalBatchNorm1d(context.num_classes, context.group)


class UndeclaredGather(GlobalGram):
    """Gathers without `Requirements.whole_batch`."""

    requires = Requirements()


class WrongInitStage(InitStage):
    """All mistakes are in its init stage: a name that it does not declare, rows of all workers, a root at zero."""

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        teacher_NK = batch.all_gather(teacher.logits_BK)
        difference_NK = self.decoder(self.encoder(teacher_NK)) - teacher_NK
        return {"zzz": (difference_NK * 0).square().sum().sqrt()}


class InitGather(InitStage):
    """Gathers in its init stage alone, without `Requirements.whole_batch`."""

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        teacher_NK = batch.all_gather(teacher.logits_BK)
        return {"reconstruction": (self.decoder(self.encoder(teacher_NK)) - teacher_NK).square().mean()}


class HalfTrained(InitStage):
    """The loss of its init stage leaves out parameters that it trains there, and takes a root that may be one of 0."""

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        difference_BK = student.logits_BK.detach() - teacher.logits_BK
        return {"reconstruction": (self.encoder.weight.square().sum() * difference_BK.square().sum(1)).sqrt()}
