"""The gradient noise scale: the batch size up to which a step learns almost in proportion to its number of images.

B_simple = tr(Σ)/|G|², where G is the gradient of the mean loss and Σ the covariance of one image's gradient (McCandlish et al.
2018, "An Empirical Model of Large-Batch Training", section 2.2). Both are estimated from gradients that a step computes anyway
(appendix A.1): the squared norm of the gradient over all N images, and those over its P parts, which are the ranks' batches
before the all-reduce, or a single worker's micro-batches. Parts may differ in size: for n_p images with the mean gradient G_p,

    big = |G_N|²              E big   = |G|² + tr(Σ)/N
    small = Σ (n_p/N)·|G_p|²  E small = |G|² + tr(Σ)·P/N

    tr(Σ) ≈ (small − big)·N/(P − 1)        |G|² ≈ (P·big − small)/(P − 1)

which for equal parts are the paper's formulas with B_big = N and B_small = N/P. With batch norm, an image's gradient depends on
its part, and the result is the noise between parts. Both estimates are averaged over steps before the division.

Shapes: S steps.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainables.distributed.group import GlobalCount, Group

SUMS = ("trace", "square", "big", "steps")
"""Sums over steps: estimates of tr(Σ) and |G|², squared norm of the gradient, and the number of steps."""
DECAY = 0.99
"""Decay of the moving average per step; it covers about 100 steps."""
_MAX_PENDING = 256


class GradientNoise:
    """Sums noise estimates of the steps since the last log line, on the device, without waiting for it.

    In each step, call `end_micro_batch` after each backward, then `end_step` before the gradients are changed.
    """

    def __init__(self, module: nn.Module, group: Group):
        """`module` is the DDP wrapper if there are several ranks. Gradients stay bit-identical to those without this."""
        self._group = group
        self._indices = {p: index for index, p in enumerate(module.parameters()) if p.requires_grad}
        self._norms: dict[int, Tensor] = {}
        """Parameter index → norm of its gradient over this part."""
        self._num_images = 0
        self._small: Tensor | None = None
        self._pending: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=group.device)
        if isinstance(module, DistributedDataParallel):
            # A lambda, since DDP rejects a hook whose annotations are strings.
            module.register_comm_hook(None, lambda _, bucket: self._all_reduce(bucket))
        elif group.world_size == 1:
            for parameter, index in self._indices.items():  # hooks get the micro-batch's own gradient
                parameter.register_hook(partial(self._record_norm, index))

    def end_micro_batch(self, num_images: int) -> None:
        """End a micro-batch after its backward. Gradients under DDP's `no_sync` count with the micro-batch that is reduced."""
        self._num_images += num_images
        if self._norms:
            # DDP rebuilds its buckets after the first step. Adding norms in parameter order gives the same bits for any buckets,
            # and so after a resume.
            norms = torch.stack([self._norms[index] for index in sorted(self._norms)])
            small = norms.double().square().sum() / max(self._num_images, 1)
            self._small = small if self._small is None else self._small + small
            self._norms, self._num_images = {}, 0

    def end_step(self, count: GlobalCount, scaler: torch.amp.GradScaler, norm: Tensor) -> None:
        """End a step after its last micro-batch. `norm` (scalar) is that of the whole gradient, with AMP scaling."""
        if self._small is None:  # nothing was reduced; `check_replicas` will report that
            return
        scale = scaler.scale(torch.ones((), device=self._group.device))
        self._pending.append((self._small, norm, count.totals, scale))
        self._small = None
        if len(self._pending) >= _MAX_PENDING:
            self._reduce_pending()

    def take(self) -> Tensor:
        """Return this rank's share of `SUMS` since the last call, (len(SUMS),) float64: summed over ranks they give `SUMS`."""
        self._reduce_pending()
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def _record_norm(self, index: int, gradient: Tensor) -> None:
        self._norms[index] = torch.linalg.vector_norm(gradient.detach())

    def _all_reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce like DDP, and record the norms of the input."""
        norms = torch._foreach_norm(bucket.gradients())
        self._norms |= {self._indices[p]: norm for p, norm in zip(bucket.parameters(), norms, strict=True)}
        buffer: Tensor = bucket.buffer()
        buffer.mul_(1 / self._group.world_size)  # as DDP does: a division could differ in the last bit
        work = dist.all_reduce(buffer, group=self._group.process_group, async_op=True)
        future: torch.futures.Future[list[Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def _reduce_pending(self) -> None:
        """Add up the pending steps, except those with one part and those that AMP's scaler skips."""
        if not self._pending:
            return
        small_S, norm_S, totals_S2, scale_S = (torch.stack(column) for column in zip(*self._pending, strict=True))
        self._pending = []
        images_S, parts_S = totals_S2[:, 0], totals_S2[:, 1]
        ranks = self._group.world_size
        # A rank's loss, and so its gradient, is world_size/N times the sum over its images, see `GlobalCount.weight`.
        small_S = small_S * images_S / (ranks * scale_S.double()).square()
        big_S = (norm_S.double() / scale_S.double()).square()
        parts_less_1_S = (parts_S - 1).clamp(min=1)
        estimates_S4 = torch.stack(
            [
                (small_S - big_S / ranks) * images_S / parts_less_1_S,
                (parts_S * big_S / ranks - small_S) / parts_less_1_S,
                big_S / ranks,
                torch.full_like(big_S, 1 / ranks),
            ],
            dim=1,
        )
        valid_S = (parts_S > 1) & torch.isfinite(big_S)
        self._sums += torch.where(valid_S[:, None], estimates_S4, 0.0).sum(0)


Sums = list[float]
"""`SUMS` as plain numbers."""


def named(sums: Sums) -> dict[str, float]:
    """Return `noise_scale`, in images, and `grad_norm`, the root mean square of the gradients' norms.

    A number is left out if no step was measured, or if the noise hides the gradient.
    """
    trace, square, big, steps = sums
    values = {"noise_scale": max(trace, 0.0) / square} if square > 0 else {}
    return values | ({"grad_norm": math.sqrt(big / steps)} if steps > 0 else {})


class NoiseHistory:
    """The noise scale of recent steps, of the epoch, and of the whole job."""

    def __init__(self, saved: Mapping[str, Sums] | None = None):
        """`saved` is the `state` of an earlier process of the job, to continue from."""
        nothing = [0.0] * len(SUMS)
        self._sums_by_span = {"recent": nothing, "epoch": nothing, "whole": nothing, **(saved or {})}

    def state(self) -> dict[str, Sums]:
        """Return plain data from which a later process of the job continues."""
        return dict(self._sums_by_span)

    def add(self, window: Sums) -> dict[str, float]:
        """Add the sums of a log line's steps. Return the numbers of the moving average, which decays by `DECAY` per step."""
        steps = window[-1]
        if steps > 0:
            decay = DECAY**steps
            # The last number is the sum of weights: dividing by it corrects the bias of the first steps.
            pairs = zip(self._sums_by_span["recent"], window, strict=True)
            self._sums_by_span["recent"] = [decay * old + (1 - decay) * new / steps for old, new in pairs]
            self._add_to("epoch", window)
        return named(self._sums_by_span["recent"])

    def end_epoch(self) -> dict[str, float]:
        """Return the epoch's numbers, and add its sums to the whole job's, relative to the squared gradient: see `whole`."""
        epoch = self._sums_by_span["epoch"]
        _, _, big, steps = epoch
        if big > 0:
            self._add_to("whole", [number * steps / big for number in epoch[:-1]] + [steps])
        self._sums_by_span["epoch"] = [0.0] * len(SUMS)
        return named(epoch)

    def whole(self) -> dict[str, float]:
        """Return the `noise_scale` that determines the steps to a target: its mean over the progress made.

        Relative to a step without noise, a step makes progress 1/(1 + B_noise/B). S steps at batch size B do the work of
        S_min = ∫ dS/(1 + B_noise/B) such steps, and their mean B_noise satisfies S = S_min·(1 + B_noise/B) (after McCandlish et
        al. 2018, appendix D). Since big has the mean |G|² + tr(Σ)/B, each epoch adds its tr(Σ)/big and its |G|²/big, weighted
        by its steps, and their quotient is that mean. Before the end of the first epoch, this is the value of recent steps.
        """
        *_, steps = self._sums_by_span["whole"]
        trace, square, *_ = self._sums_by_span["whole" if steps else "recent"]
        return named([trace, square, 0.0, 0.0])

    def _add_to(self, name: str, sums: Sums) -> None:
        self._sums_by_span[name] = [old + new for old, new in zip(self._sums_by_span[name], sums, strict=True)]
