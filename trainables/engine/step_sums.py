"""Sums of losses and hits over the images of steps, on the device, and the first step with a non-finite loss.

Adding a micro-batch launches six kernels, however many terms there are, and never waits for the device.

Shapes: B this rank's batch, K classes, N names, P pending micro-batches.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trainables.engine.evaluate import hits

LABELED = "labeled"
"""Name of the count of labeled images, used if some images have no label."""
NEVER = torch.iinfo(torch.int64).max
_MAX_PENDING = 256


class StepSums:
    """Sums since the last `clear`. Those of micro-batches stay pending: non-finite losses are searched only on reading."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """`names`: `images`, optionally LABELED, `top1` and `top5` for a classifier, and the losses including `loss`."""
        self.names = tuple(names)
        self._pending_PN: list[Tensor] = []
        """Sums of micro-batches, without `images`."""
        self._steps_P: list[int] = []
        self._num_images = 0
        self._sums_N = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._bad_step = torch.full((), NEVER, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, step: int, student_BK: Tensor, labels_B: Tensor, losses: Mapping[str, Tensor]) -> None:
        """Add a micro-batch of this step. A scalar loss, of the global batch, counts once per image."""
        values = dict(losses)
        if "top1" in self.names:
            hits_B5 = hits(student_BK, labels_B).to(losses["loss"].dtype)
            values |= {"top1": hits_B5[:, 0], "top5": hits_B5.sum(1)}
        if LABELED in self.names:
            values[LABELED] = (labels_B >= 0).to(losses["loss"].dtype)
        absent = [name for name in self.names[1:] if name not in values]
        values |= dict.fromkeys(absent, losses["loss"].new_zeros(())) if absent else {}
        all_NB = torch.stack([values[name].expand(len(labels_B)) for name in self.names[1:]])
        self._pending_PN.append(torch.sum(all_NB, 1, dtype=torch.float64))
        self._steps_P.append(step)
        self._num_images += len(labels_B)
        if len(self._steps_P) == _MAX_PENDING:
            self._fold()

    @property
    def values_N(self) -> Tensor:
        """The sums (N,) in the order of `names`, float64 on the device."""
        self._fold()
        return self._sums_N

    @property
    def bad_step(self) -> Tensor:
        """The first step of the job whose loss was not finite, or NEVER (scalar, int64 on the device)."""
        self._fold()
        return self._bad_step

    def clear(self) -> None:
        """Reset the sums, but not `bad_step`."""
        self._fold()
        self._sums_N = torch.zeros_like(self._sums_N)

    def _fold(self) -> None:
        """Add the pending rows to the sums."""
        if not self._pending_PN:
            return
        pending_PN = torch.stack(self._pending_PN)
        self._sums_N = self._sums_N + F.pad(pending_PN.sum(0), (1, 0), value=self._num_images)
        bad_P = ~torch.isfinite(pending_PN[:, self.names.index("loss") - 1])
        # From pinned memory, as a copy from other memory may wait for the GPU.
        steps_P = torch.tensor(self._steps_P, pin_memory=bad_P.is_cuda).to(bad_P.device, non_blocking=True)
        self._bad_step = torch.minimum(self._bad_step, torch.where(bad_P, steps_P, NEVER).amin())
        self._pending_PN, self._steps_P, self._num_images = [], [], 0
