"""Turn losses into new parameters: one class per strategy, chosen when a job is built.

With one optimizer on several ranks, DDP averages the gradients during the backward pass.

With several optimizers, one forward pass gives all losses, such as `a = G1(D(x))` and `b = G2(D(x))`. Each optimizer gets the
gradients of its own losses, all taken at the same parameters, and the changes to a shared parameter are added up. DDP cannot
do this, because its buckets hold one gradient per parameter. Instead, one all-reduce per optimizer averages the gradients
after the last backward, without overlap.

Extra memory with several optimizers: each further optimizer's state and gradients; during the updates, two copies of the
shared parameters and a third of those that one optimizer changes; on several ranks, a flat copy of one optimizer's gradients.
"""

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from trainables.distributed.group import GlobalCount, Group, all_reduce_sum
from trainables.engine.loss_optimizers import DotSGD, LossOptimizer
from trainables.engine.losses import Losses
from trainables.metrics.allreduce_wait import AllreduceWait
from trainables.metrics.noise_scale import GradientNoise


@dataclass(frozen=True)
class UpdateSettings:
    """Settings common to all kinds of update."""

    scaler: torch.amp.GradScaler
    group: Group
    clip: Callable[[Sequence[nn.Parameter]], object] | None = None
    """Clips the gradients of each optimizer, see `clipping`."""
    compiled: bool = False
    """Whether forward passes may run compiled."""
    sync_grads: bool = True
    """Whether to average gradients over ranks; False only in a timing run that leaves the all-reduce out."""


class ParameterUpdate(ABC):
    """How a train step changes the parameters.

    For each micro-batch, a step calls `module` and `backward` inside `micro_batch`; then `end_backward` and `step`. Subclasses
    average gradients over ranks in the last backward (DDP), in `end_backward` or in `step`.
    """

    noise: GradientNoise | None = None
    """Measures the gradient noise, if wanted and possible."""
    noise_disabled_reason: ClassVar[str | None] = None
    """Why this kind of update cannot measure the gradient noise."""

    requires_eager_forward = False
    """Whether the next forward pass must not run compiled."""

    def __init__(self, module: nn.Module, settings: UpdateSettings) -> None:
        """`module` is what the forward pass of a step calls."""
        self.module = module
        self._scaler, self._clip = settings.scaler, settings.clip
        self._group = settings.group if settings.sync_grads else Group()

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context for the forward and backward pass of a micro-batch. Gradients are averaged only after the last one."""
        return contextlib.nullcontext()

    def wait(self, count: GlobalCount) -> None:
        """Wait until the ranks have counted the step's samples. Called before each `backward`."""
        count.wait()

    @abstractmethod
    def backward(self, losses: Losses, count: GlobalCount, num_images: int) -> None:
        """Add the gradients of a micro-batch of `num_images` images; `count` counts the samples of the whole step."""

    def end_backward(self, count: GlobalCount) -> None:  # noqa: B027
        """Called after the last `backward` of a step."""

    @abstractmethod
    def step(self) -> None:
        """Change the parameters and clear the gradients. Parameters that no loss reaches do not change, nor decay."""

    def begin_epoch(self) -> None:  # noqa: B027
        """Called at the start of an epoch, when losses may begin to reach other parameters."""

    def _step_optimizer(self, optimizer: LossOptimizer) -> None:
        """Clip the gradients, change the parameters, and clear the gradients."""
        if self._clip is not None:
            self._scaler.unscale_(optimizer.optimizer)
            self._clip(optimizer.parameters)
        self._scaler.step(optimizer.optimizer)
        optimizer.optimizer.zero_grad(set_to_none=True)


class SharedUpdate(ParameterUpdate):
    """One optimizer for all losses. On several ranks, `module` is in DDP, which averages gradients in the last backward."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: LossOptimizer,
        settings: UpdateSettings,
        *,
        noise: GradientNoise | None = None,
        allreduce_wait: AllreduceWait | None = None,
    ) -> None:
        """`noise` measures the gradient noise, `allreduce_wait` times DDP's all-reduce."""
        super().__init__(module, settings)
        self._optimizer, self.noise, self._allreduce_wait = optimizer, noise, allreduce_wait
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        self._syncs_grads, self._is_last = settings.sync_grads, False

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        self._is_last = last
        if self._ddp is None or (last and self._syncs_grads):
            return contextlib.nullcontext()
        return self._ddp.no_sync()

    def wait(self, count: GlobalCount) -> None:
        if self._allreduce_wait is None or self._ddp is None or count.is_known:
            return
        self._allreduce_wait.begin()
        count.wait()
        self._allreduce_wait.end()

    def backward(self, losses: Losses, count: GlobalCount, num_images: int) -> None:
        wait = self._allreduce_wait if self._ddp is not None and self._is_last else None
        total = self._scaler.scale(losses.total(count.weight()))
        if wait is not None:
            wait.begin_after(total)
        total.backward()  # type: ignore[no-untyped-call]
        if wait is not None:
            wait.end()
        if self.noise is not None:
            self.noise.end_micro_batch(num_images)

    def end_backward(self, count: GlobalCount) -> None:
        if self.noise is not None:
            gradients = [p.grad for p in self._optimizer.parameters if p.grad is not None]
            self.noise.end_step(count, self._scaler, get_total_norm(gradients))

    def step(self) -> None:
        self._step_optimizer(self._optimizer)
        self._scaler.update()


class _CollectedGradients:
    """Gradients from `torch.autograd.grad`, added up over micro-batches. They bypass DDP."""

    def __init__(self, *, compiled: bool) -> None:
        """`compiled`: forward passes may run compiled. Those give zero gradients to parameters that a loss does not reach, where
        eager ones give None, so the first pass runs eagerly and records which are reached."""
        self._compiled = compiled
        self._gradients: list[Tensor | None] = []
        self._is_reached: list[bool] | None = None

    @property
    def requires_eager_forward(self) -> bool:
        return self._compiled and self._is_reached is None

    def add(self, total: Tensor, parameters: Sequence[nn.Parameter], *, retain_graph: bool = False) -> None:
        new: Sequence[Tensor | None] = torch.autograd.grad(total, parameters, retain_graph=retain_graph, allow_unused=True)
        if self._is_reached is None:
            self._is_reached = [gradient is not None for gradient in new]
        if self._compiled:
            new = [gradient if reached else None for gradient, reached in zip(new, self._is_reached, strict=True)]
        if not self._gradients:
            self._gradients = list(new)
            return
        for index, (old, gradient) in enumerate(zip(self._gradients, new, strict=True)):
            if old is not None and gradient is not None:
                gradient = old + gradient
            self._gradients[index] = old if gradient is None else gradient

    def reached(self, parameters: Sequence[nn.Parameter]) -> set[nn.Parameter]:
        """Return those of `parameters` that have a gradient, without waiting for the device."""
        return {parameter for parameter, gradient in zip(parameters, self._gradients, strict=True) if gradient is not None}

    def move_mean_to(self, parameters: Iterable[nn.Parameter], group: Group) -> None:
        """Move the gradients, averaged over all ranks, to the parameters."""
        gradients, self._gradients = all_reduce_mean(self._gradients, group), []
        assign_grads(parameters, gradients)

    def reset_reached(self) -> None:
        self._is_reached = None


class PerLossUpdate(ParameterUpdate):
    """One optimizer per group of losses, or one for only some losses. `module` is not in DDP: `step` averages the gradients."""

    noise_disabled_reason = "some losses have their own optimizers"

    def __init__(self, module: nn.Module, optimizers: Sequence[LossOptimizer], settings: UpdateSettings) -> None:
        super().__init__(module, settings)
        self._optimizers = tuple(optimizers)
        self._collected = [_CollectedGradients(compiled=settings.compiled) for _ in optimizers]
        counts = Counter(parameter for each in optimizers for parameter in each.parameters)
        self._shared = [parameter for parameter, count in counts.items() if count > 1]

    @property
    def requires_eager_forward(self) -> bool:  # type: ignore[override]
        return any(collected.requires_eager_forward for collected in self._collected)

    def backward(self, losses: Losses, count: GlobalCount, num_images: int) -> None:
        weight = count.weight()
        for each, collected in zip(self._optimizers, self._collected, strict=True):
            total = self._scaler.scale(losses.total(weight, each.losses))
            collected.add(total, each.parameters, retain_graph=each is not self._optimizers[-1])

    def step(self) -> None:
        """Start every optimizer from the same parameters, since changes such as weight decay depend on them."""
        self._set_shared_of_dot()
        shared = [parameter.detach() for parameter in self._shared]
        before = [parameter.clone() for parameter in shared]
        changes = [torch.zeros_like(parameter) for parameter in before]
        for each, collected in zip(self._optimizers, self._collected, strict=True):
            collected.move_mean_to(each.parameters, self._group)  # one optimizer at a time, to save memory
            self._step_optimizer(each)
            if shared:
                torch._foreach_add_(changes, torch._foreach_sub(shared, before))
                torch._foreach_copy_(shared, before)
        if shared:
            torch._foreach_add_(shared, changes)
        self._scaler.update()

    def begin_epoch(self) -> None:
        for collected in self._collected:
            collected.reset_reached()

    def _set_shared_of_dot(self) -> None:
        """Give DOT's optimizers the parameters that all of them reach in this step, which they update differently."""
        dots = [each.optimizer for each in self._optimizers if isinstance(each.optimizer, DotSGD)]
        if dots:
            pairs = zip(self._optimizers, self._collected, strict=True)
            shared = set.intersection(*(collected.reached(each.parameters) for each, collected in pairs))
            for dot in dots:
                dot.shared = shared


def all_reduce_mean(gradients: Sequence[Tensor | None], group: Group) -> list[Tensor | None]:
    """Average gradients over ranks in one all-reduce. Those that no loss reaches are None on every rank and stay None."""
    present = [gradient for gradient in gradients if gradient is not None]
    if group.world_size == 1 or not present:
        return list(gradients)
    flat = _flatten_dense_tensors(present)
    all_reduce_sum(flat, group)
    flat /= group.world_size
    means = iter(_unflatten_dense_tensors(flat, present))
    return [None if gradient is None else next(means) for gradient in gradients]


def assign_grads(parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor | None]) -> None:
    """Set `.grad` with the parameter's own strides, as autograd does: fused optimizers index both by memory offset."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient


def build_update(
    module: nn.Module,
    optimizers: Sequence[LossOptimizer],
    settings: UpdateSettings,
    *,
    measures_noise: bool = False,
    allreduce_wait: AllreduceWait | None = None,
) -> ParameterUpdate:
    """Choose how steps change the parameters. With `measures_noise` they measure the gradient noise, if the kind can."""
    if len(optimizers) > 1 or "task" not in optimizers[0].losses:  # an init stage's losses may not reach all parameters
        return PerLossUpdate(module, optimizers, settings)
    ddp_module = wrap(module, settings.group)
    noise = GradientNoise(ddp_module, settings.group) if measures_noise else None
    return SharedUpdate(ddp_module, optimizers[0], settings, noise=noise, allreduce_wait=allreduce_wait)


def wrap(model: nn.Module, group: Group) -> nn.Module:
    """Wrap `model` in DDP if there are several ranks."""
    if group.world_size == 1:
        return model
    # Batch norm statistics need not be synchronized: evaluation and checkpoints use rank 0's.
    signature = inspect.signature(DistributedDataParallel)  # torch 2.14 renamed the option
    option = "forward_sync_buffers" if "forward_sync_buffers" in signature.parameters else "broadcast_buffers"
    unshared: dict[str, Any] = {option: False}
    ids = [group.device] if group.device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=ids, process_group=group.process_group, gradient_as_bucket_view=True, **unshared
    )
