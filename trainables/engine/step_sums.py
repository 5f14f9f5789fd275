"""What steps add up over their images, on the device: losses and hits, and the first loss that is not finite.

A micro-batch launches six kernels here whatever its terms are; nothing waits for the device.

Shapes: B batch of this rank, K classes, N names, P pending steps.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainables.engine.evaluate import hits

LABELED = "labeled"
"""The images with a label, where some may have none."""
_MAX_PENDING = 256


class StepSums:
    """Sums since the last `clear`. What is not read yet is kept by step, so that a step itself compares nothing."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """`names`: `images`, perhaps LABELED, `top1` and `top5` of a classifier, then those of losses, `loss` among them."""
        self.names = tuple(names)
        self._loss = self.names.index("loss")
        self._pending_PN = torch.zeros((_MAX_PENDING, len(names)), dtype=torch.float64, device=device)
        self._first_step, self._num_pending, self._num_images = 0, 0, 0
        self._sums_N = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._bad_step = torch.full((), -1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, step: int, student_BK: Tensor, labels_B: Tensor, losses: Mapping[str, Tensor]) -> None:
        """Add a micro-batch of this step. A loss that is a scalar, of the global batch, counts for each image."""
        sums_N, is_new = self._begin(step, len(labels_B))
        values = dict(losses)
        if "top1" in self.names:
            hits_B5 = hits(student_BK, labels_B).to(losses["loss"].dtype)
            values |= {"top1": hits_B5[:, 0], "top5": hits_B5.sum(1)}
        if LABELED in self.names:
            values[LABELED] = (labels_B >= 0).to(losses["loss"].dtype)
        absent = [name for name in self.names[1:] if name not in values]
        values |= dict.fromkeys(absent, losses["loss"].new_zeros(())) if absent else {}
        all_NB = torch.stack([values[name].expand(len(labels_B)) for name in self.names[1:]])
        if is_new:
            torch.sum(all_NB, 1, dtype=torch.float64, out=sums_N)
        else:
            sums_N += torch.sum(all_NB, 1, dtype=torch.float64)

    def _begin(self, step: int, num_images: int) -> tuple[Tensor, bool]:
        """Where the sums of this step are pending, but for `images`, and whether there are none yet."""
        index = step - self._first_step
        if index not in (self._num_pending - 1, self._num_pending) or index == _MAX_PENDING:
            self._fold()
            self._first_step, index = step, 0
        is_new = index == self._num_pending
        self._num_pending, self._num_images = index + 1, self._num_images + num_images
        return self._pending_PN[index, 1:], is_new

    @property
    def values_N(self) -> Tensor:
        """By `names`, float64 on the device."""
        self._fold()
        return self._sums_N

    @property
    def bad_step(self) -> Tensor:
        """The first step of all whose loss was not finite, or -1 (scalar, int64 on the device)."""
        self._fold()
        return self._bad_step

    def clear(self) -> None:
        """Begin the sums anew; the bad step stays."""
        self._fold()
        self._sums_N = torch.zeros_like(self._sums_N)

    def _fold(self) -> None:
        """Add up what is pending."""
        if not self._num_pending:
            return
        pending_PN = self._pending_PN[: self._num_pending]
        self._sums_N = self._sums_N + pending_PN.sum(0)
        self._sums_N[0] += self._num_images
        bad_P = ~torch.isfinite(pending_PN[:, self._loss])
        first = torch.where(bad_P.any(), self._first_step + bad_P.byte().argmax(), -1)
        self._bad_step = torch.where(self._bad_step < 0, first, self._bad_step)
        self._num_pending = self._num_images = 0
