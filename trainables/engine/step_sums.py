"""Sums of losses and hits over the images of steps, on the device, and the first step with a non-finite loss.

Adding a micro-batch launches six kernels, however many terms there are, and never waits for the device.

Shapes: B this rank's batch, K classes, N names, P pending steps.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainables.engine.evaluate import hits

LABELED = "labeled"
"""Name of the count of labeled images, used if some images have no label."""
_MAX_PENDING = 256


class StepSums:
    """Sums since the last `clear`. Pending steps are stored as rows, so that non-finite losses are searched only on reading."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """`names`: `images`, optionally LABELED, `top1` and `top5` for a classifier, and the losses including `loss`."""
        self.names = tuple(names)
        self._loss = self.names.index("loss")
        self._pending_PN = torch.zeros((_MAX_PENDING, len(names)), dtype=torch.float64, device=device)
        self._first_step, self._num_pending, self._num_images = 0, 0, 0
        self._sums_N = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._bad_step = torch.full((), -1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, step: int, student_BK: Tensor, labels_B: Tensor, losses: Mapping[str, Tensor]) -> None:
        """Add a micro-batch of this step. A scalar loss, of the global batch, counts once per image."""
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
        """Return this step's row without `images`, and whether the row is new."""
        index = step - self._first_step
        if index not in (self._num_pending - 1, self._num_pending) or index == _MAX_PENDING:
            self._fold()
            self._first_step, index = step, 0
        is_new = index == self._num_pending
        self._num_pending, self._num_images = index + 1, self._num_images + num_images
        return self._pending_PN[index, 1:], is_new

    @property
    def values_N(self) -> Tensor:
        """The sums (N,) in the order of `names`, float64 on the device."""
        self._fold()
        return self._sums_N

    @property
    def bad_step(self) -> Tensor:
        """The first step of the job whose loss was not finite, or -1 (scalar, int64 on the device)."""
        self._fold()
        return self._bad_step

    def clear(self) -> None:
        """Reset the sums, but not `bad_step`."""
        self._fold()
        self._sums_N = torch.zeros_like(self._sums_N)

    def _fold(self) -> None:
        """Add the pending rows to the sums."""
        if not self._num_pending:
            return
        pending_PN = self._pending_PN[: self._num_pending]
        self._sums_N = self._sums_N + pending_PN.sum(0)
        self._sums_N[0] += self._num_images
        bad_P = ~torch.isfinite(pending_PN[:, self._loss])
        first = torch.where(bad_P.any(), self._first_step + bad_P.byte().argmax(), -1)
        self._bad_step = torch.where(self._bad_step < 0, first, self._bad_step)
        self._num_pending = self._num_images = 0
