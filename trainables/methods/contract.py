"""What a distillation method is to the training step, which knows none by name.

Shapes: B batch, K classes.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class LogitTerms(Protocol):
    """A method's own terms, from logits and labels: see `Method.terms`."""

    def __call__(self, student_BK: Tensor, teacher_BK: Tensor, labels_B: Tensor, temperature: float, /) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Method:
    """A way to distil: what it adds to task_weight·CE + soft_weight·T²·KL, weighed by method_weight.

    Its terms are per sample, so that the step can weigh samples rather than ranks or micro-batches.
    """

    name: str
    own_terms: tuple[str, ...] = ()
    """Names of its own terms, known before anything is computed; empty: CE and KL are all there is."""
    function: str = ""
    """Where the own terms are computed, as `package.module:name`: a string, so that a list of methods needs no torch."""

    reads_labels: bool = False
    """Whether its own terms need the one class of each image, which a mixed image does not have."""

    def terms(self, student_BK: Tensor, teacher_BK: Tensor, labels_B: Tensor, temperature: float) -> dict[str, Tensor]:
        """The method's own terms, each (B,) and at least float32, with the method's inner weights and T² in them.

        Their sum over names is the sample's `other` loss. The keys are `own_terms`, in that order. `student_BK` carries the
        gradient; `teacher_BK` may be an inference tensor.
        """
        return self._function(student_BK, teacher_BK, labels_B, temperature) if self.own_terms else {}

    @cached_property
    def _function(self) -> LogitTerms:
        function: LogitTerms = pkgutil.resolve_name(self.function)
        return function
