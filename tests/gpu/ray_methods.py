"""Methods of a user's own file, for runs in Ray: one notes where its worker is, one runs a worker out of memory."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from trainables.config import MethodOptions, Natural
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements


class WhereOptions(MethodOptions):
    """Where to write."""

    folder: str = ""


class Where(Method):
    """A term that is 0, and a file for each rank: its device, LOCAL_RANK and process."""

    Options = WhereOptions
    options: WhereOptions
    terms = ("nothing",)
    requires = Requirements(teacher=False)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._rank, self._noted = context.group.rank, False

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        logits_BK = student.logits_BK
        if not self._noted and logits_BK.requires_grad:
            facts = {"device": str(logits_BK.device), "local_rank": os.environ.get("LOCAL_RANK"), "pid": os.getpid()}
            Path(self.options.folder, f"{self._rank}.json").write_text(json.dumps(facts))
            self._noted = True
        return {"nothing": 0.0 * logits_BK.sum(1)}


class FullOptions(MethodOptions):
    """Who runs out of memory."""

    rank: Natural = 3


class Full(Method):
    """One rank asks for more memory than there is in its third step."""

    Options = FullOptions
    options: FullOptions
    terms = ("nothing",)
    requires = Requirements(teacher=False)

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._full, self._steps = context.group.rank == self.options.rank, 0

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        self._steps += 1
        if self._full and self._steps == 3:
            torch.empty(2**50, dtype=torch.uint8, device=student.logits_BK.device)
        return {"nothing": 0.0 * student.logits_BK.sum(1)}
