"""The gradient noise scale: up to about how many images a step learns almost in proportion to them.

B_simple = tr(Σ)/|G|², with G the gradient of the mean loss and Σ the covariance of one image's gradient (McCandlish et al. 2018,
"An Empirical Model of Large-Batch Training", section 2.2). Both come from what a step computes anyway (its appendix A.1): the
squared norm of the gradient over all N images against those over its P parts, which are the ranks' batches before the
all-reduce, or one worker's micro-batches. Parts need not be equal: with n_p images and the mean gradient G_p each,

    big = |G_N|²              E big   = |G|² + tr(Σ)/N
    small = Σ (n_p/N)·|G_p|²  E small = |G|² + tr(Σ)·P/N

    tr(Σ) ≈ (small − big)·N/(P − 1)        |G|² ≈ (P·big − small)/(P − 1)

which for equal parts is the paper's with B_big = N and B_small = N/P. Batch norm makes an image's gradient depend on its part;
what is measured is then the noise between parts. Each estimate is averaged over steps before one is divided by the other.

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
"""Sums over steps of the estimates of tr(Σ) and |G|², of the squared norm of the steps' gradients, and their number."""
DECAY = 0.99
"""What remains of a moving average after a step: it covers about 100 steps."""
_MAX_PENDING = 256


class GradientNoise:
    """Sums of the noise estimates of the steps since the last log line, on the device; nothing here waits for it.

    A step is a backward and `end_micro_batch` for each micro-batch, then `end_step` before the gradients are changed.
    """

    def __init__(self, module: nn.Module, group: Group):
        """`module` is the DDP wrapper where there are several ranks. Gradients are bit for bit those without this."""
        self._group = group
        self._indices = {p: index for index, p in enumerate(module.parameters()) if p.requires_grad}
        self._norms: dict[int, Tensor] = {}
        """The norms of this part's gradients, by the index of their parameter."""
        self._num_images = 0
        self._small: Tensor | None = None
        self._pending: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=group.device)
        if isinstance(module, DistributedDataParallel):
            # A lambda, since DDP compares a hook's annotations with types, and here they are text.
            module.register_comm_hook(None, lambda _, bucket: self._all_reduce(bucket))
        elif group.world_size == 1:
            for parameter, index in self._indices.items():  # called with what a micro-batch adds to its gradient
                parameter.register_hook(partial(self._record_norm, index))

    def end_micro_batch(self, num_images: int) -> None:
        """A micro-batch's backward is done. Under DDP's `no_sync` gradients add up: they count with the one that is reduced."""
        self._num_images += num_images
        if self._norms:
            # DDP makes new buckets after its first step. Added up by parameter, a norm has the same bits in all buckets, and
            # so in a job that is resumed in the middle.
            norms = torch.stack([self._norms[index] for index in sorted(self._norms)])
            small = norms.double().square().sum() / max(self._num_images, 1)
            self._small = small if self._small is None else self._small + small
            self._norms, self._num_images = {}, 0

    def end_step(self, count: GlobalCount, scaler: torch.amp.GradScaler, norm: Tensor) -> None:
        """After the last micro-batch. `norm` (scalar): of the whole batch's gradient, as the parts' times the scaler's factor."""
        if self._small is None:  # nothing was reduced, which `check_replicas` finds
            return
        scale = scaler.scale(torch.ones((), device=self._group.device))
        self._pending.append((self._small, norm, count.totals, scale))
        self._small = None
        if len(self._pending) >= _MAX_PENDING:
            self._reduce_pending()

    def take(self) -> Tensor:
        """This rank's part of `SUMS` since the last call, (len(SUMS),) float64: the ranks' parts add up to them."""
        self._reduce_pending()
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def _record_norm(self, index: int, gradient: Tensor) -> None:
        self._norms[index] = torch.linalg.vector_norm(gradient.detach())

    def _all_reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's own reduction, which records the norms of its input."""
        norms = torch._foreach_norm(bucket.gradients())
        self._norms |= {self._indices[p]: norm for p, norm in zip(bucket.parameters(), norms, strict=True)}
        buffer: Tensor = bucket.buffer()
        buffer.mul_(1 / self._group.world_size)  # as DDP does it: a division may differ in the last bit
        work = dist.all_reduce(buffer, group=self._group.process_group, async_op=True)
        future: torch.futures.Future[list[Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def _reduce_pending(self) -> None:
        """Add up the pending steps, without those of one part and those that AMP's scaler will skip."""
        if not self._pending:
            return
        small_S, norm_S, totals_S2, scale_S = (torch.stack(column) for column in zip(*self._pending, strict=True))
        self._pending = []
        images_S, parts_S = totals_S2[:, 0], totals_S2[:, 1]
        ranks = self._group.world_size
        # A rank's loss is world_size/N times the sum over its images, see `GlobalCount.weight`: so is its gradient.
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
"""`SUMS` as plain numbers, all 0 or weighted equally."""


def named(sums: Sums) -> dict[str, float]:
    """`noise_scale` in images and `grad_norm`, the root mean square norm of the steps' gradients.

    Either is left out where it is unknown: no step was measured, or the noise hides the gradient.
    """
    trace, square, big, steps = sums
    values = {"noise_scale": max(trace, 0.0) / square} if square > 0 else {}
    return values | ({"grad_norm": math.sqrt(big / steps)} if steps > 0 else {})


class NoiseHistory:
    """The noise scale of the recent steps, of the epoch and of the whole job."""

    def __init__(self, saved: Mapping[str, Sums] | None = None):
        """`saved`: the `state` of an earlier process of the job, which is continued."""
        nothing = [0.0] * len(SUMS)
        self._sums_by_span = {"recent": nothing, "epoch": nothing, "whole": nothing, **(saved or {})}

    def state(self) -> dict[str, Sums]:
        """What a later process of the job continues from, as plain data."""
        return dict(self._sums_by_span)

    def add(self, window: Sums) -> dict[str, float]:
        """Add the sums of a log line's steps. Returns the moving averages, which decay by `DECAY` a step."""
        steps = window[-1]
        if steps > 0:
            decay = DECAY**steps
            # Its last number is the sum of the weights, so that dividing by it corrects the bias of the first steps.
            pairs = zip(self._sums_by_span["recent"], window, strict=True)
            self._sums_by_span["recent"] = [decay * old + (1 - decay) * new / steps for old, new in pairs]
            self._add_to("epoch", window)
        return named(self._sums_by_span["recent"])

    def end_epoch(self) -> dict[str, float]:
        """The epoch's values. They are added to the whole job's relative to the squared gradient, see `whole`."""
        epoch = self._sums_by_span["epoch"]
        _, _, big, steps = epoch
        if big > 0:
            self._add_to("whole", [number * steps / big for number in epoch[:-1]] + [steps])
        self._sums_by_span["epoch"] = [0.0] * len(SUMS)
        return named(epoch)

    def whole(self) -> dict[str, float]:
        """`noise_scale` as steps to a target depend on it: its mean over the progress that was made.

        A step's progress is 1/(1 + B_noise/B) of a step without noise, and S steps at batch B do the work of
        S_min = ∫ dS/(1 + B_noise/B) such steps, whose mean B_noise is the one in S = S_min·(1 + B_noise/B) (after McCandlish
        et al. 2018, appendix D). As |G|² + tr(Σ)/B is the mean of big, each epoch adds its tr(Σ)/big and its |G|²/big, a step
        counting one, and their quotient is that mean. Before the first epoch's end: that of the recent steps.
        """
        *_, steps = self._sums_by_span["whole"]
        trace, square, *_ = self._sums_by_span["whole" if steps else "recent"]
        return named([trace, square, 0.0, 0.0])

    def _add_to(self, name: str, sums: Sums) -> None:
        self._sums_by_span[name] = [old + new for old, new in zip(self._sums_by_span[name], sums, strict=True)]
