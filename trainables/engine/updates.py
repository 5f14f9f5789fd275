"""From losses to new parameters, one class a way to do it. The way is chosen when a job is built.

On several ranks DDP averages the gradients within the backward pass.

With an optimizer for each loss, `a = G1(D(x))` and `b = G2(D(x))`, one forward gives both losses; each optimizer gets the
gradients of its losses alone, all taken at the same parameters, and the changes of a parameter that they share are added up. No
DDP: its buckets have one gradient a parameter. Gradients are averaged over ranks in one all-reduce a loss, after the last
backward, so that none of it overlaps with one.

Memory on top of one optimizer's: for each further optimizer its state and its gradients, and during their updates two copies of
the shared parameters and a third of those that one changes; on several ranks a flat copy of one loss's gradients at a time.
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
    """What all updates of a job share."""

    scaler: torch.amp.GradScaler
    group: Group
    clip: Callable[[Sequence[nn.Parameter]], object] | None = None
    """Bounds the gradients of each optimizer's losses, see `clipping`."""
    compiled: bool = False
    """Whether forward passes may be compiled."""
    averages: bool = True
    """Whether gradients are averaged over ranks; False: a timing run without all-reduces."""


class ParameterUpdate(ABC):
    """A step calls `module` and `backward` within `micro_batch`, for each; at the end `end_backward` and `step`.

    Where gradients are averaged over ranks: by DDP within the last backward, in `end_backward`, or in `step`, as the kind says.
    """

    noise: GradientNoise | None = None
    """The measurement of the steps' gradient noise, where there is one."""
    noise_obstacle: ClassVar[str | None] = None
    """Why this kind of update cannot measure it."""

    requires_eager_forward = False
    """Whether the next step's forward may not be a compiled one."""

    def __init__(self, module: nn.Module, settings: UpdateSettings) -> None:
        """`module` is what a step's forward calls."""
        self.module = module
        self._scaler, self._clip = settings.scaler, settings.clip
        self._group = settings.group if settings.averages else Group()

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Forward and backward of a micro-batch run in this context. Gradients are averaged over ranks after the last one."""
        return contextlib.nullcontext()

    def wait(self, count: GlobalCount) -> None:
        """Wait for the step's samples to be counted, if the ranks still do that; once for each micro-batch, before `backward`."""
        count.wait()

    @abstractmethod
    def backward(self, losses: Losses, count: GlobalCount, num_images: int) -> None:
        """Add the gradients of a micro-batch of `num_images` images. `count`: of the step's samples."""

    def end_backward(self, count: GlobalCount) -> None:  # noqa: B027
        """All micro-batches of the step have gone through `backward`."""

    @abstractmethod
    def step(self) -> None:
        """Change the parameters and drop the gradients. What no loss reaches stays as it is, without weight decay too."""

    def begin_epoch(self) -> None:  # noqa: B027
        """Losses may reach other parameters from here on."""

    def _step_optimizer(self, optimizer: LossOptimizer) -> None:
        """Clip, change the parameters, and drop their gradients."""
        if self._clip is not None:
            self._scaler.unscale_(optimizer.optimizer)
            self._clip(optimizer.parameters)
        self._scaler.step(optimizer.optimizer)
        optimizer.optimizer.zero_grad(set_to_none=True)


class SharedUpdate(ParameterUpdate):
    """One optimizer for all losses. With several ranks `module` is under DDP, which averages gradients in the last backward."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: LossOptimizer,
        settings: UpdateSettings,
        *,
        noise: GradientNoise | None = None,
        allreduce_wait: AllreduceWait | None = None,
    ) -> None:
        """`noise`: the measurement of the steps' gradient noise, if any. `allreduce_wait`: times DDP's all-reduce, if any."""
        super().__init__(module, settings)
        self._optimizer, self.noise, self._allreduce_wait = optimizer, noise, allreduce_wait
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        self._averages, self._is_last = settings.averages, False

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        self._is_last = last
        if self._ddp is None or (last and self._averages):
            return contextlib.nullcontext()
        return self._ddp.no_sync()

    def wait(self, count: GlobalCount) -> None:
        if self._allreduce_wait is None or self._ddp is None or count.is_known:
            return
        self._allreduce_wait.begin()
        count.wait()
        self._allreduce_wait.end()

    def backward(self, losses: Losses, count: GlobalCount, num_images: int) -> None:
        wait = self._allreduce_wait if self._ddp is not None else None
        total = self._scaler.scale(losses.total(count.weight()))
        if wait is not None and self._is_last:
            wait.begin_after(total)
            total.backward()  # type: ignore[no-untyped-call]
            wait.end()
        else:
            total.backward()  # type: ignore[no-untyped-call]
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
    """Gradients of tensors from `torch.autograd.grad`, added up over micro-batches; they bypass DDP."""

    def __init__(self, *, compiled: bool) -> None:
        """`compiled`: forward passes may be, which give zeros for what a loss does not reach, where autograd gives None. So the
        first one is eager, and shows what it reaches."""
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
        """Those of `parameters` that have a gradient, which is known without the device."""
        return {parameter for parameter, gradient in zip(parameters, self._gradients, strict=True) if gradient is not None}

    def put_average(self, parameters: Iterable[nn.Parameter], group: Group) -> None:
        """Give the parameters the mean gradients of all ranks, and forget them here."""
        gradients, self._gradients = average(self._gradients, group), []
        put(parameters, gradients)

    def forget_reached(self) -> None:
        self._is_reached = None


class PerLossUpdate(ParameterUpdate):
    """An optimizer for each group of losses, or one for some of the losses. `module` is not under DDP: `step` averages."""

    noise_obstacle = "losses have optimizers of their own"

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
        """Every optimizer starts from the same parameters, also where its change depends on them, as weight decay does."""
        self._name_shared_to_dot()
        shared = [parameter.detach() for parameter in self._shared]
        before = [parameter.clone() for parameter in shared]
        changes = [torch.zeros_like(parameter) for parameter in before]
        for each, collected in zip(self._optimizers, self._collected, strict=True):
            collected.put_average(each.parameters, self._group)  # no loss's gradients outlive its update
            self._step_optimizer(each)
            if shared:
                torch._foreach_add_(changes, torch._foreach_sub(shared, before))
                torch._foreach_copy_(shared, before)
        if shared:
            torch._foreach_add_(shared, changes)
        self._scaler.update()

    def begin_epoch(self) -> None:
        for collected in self._collected:
            collected.forget_reached()

    def _name_shared_to_dot(self) -> None:
        """DOT's optimizers depend on which parameters the gradients of both reach in this step."""
        dots = [each.optimizer for each in self._optimizers if isinstance(each.optimizer, DotSGD)]
        if dots:
            pairs = zip(self._optimizers, self._collected, strict=True)
            shared = set.intersection(*(collected.reached(each.parameters) for each, collected in pairs))
            for dot in dots:
                dot.shared = shared


def average(gradients: Sequence[Tensor | None], group: Group) -> list[Tensor | None]:
    """Each gradient's mean over ranks, in one all-reduce; what no loss reaches stays None, as on every rank."""
    present = [gradient for gradient in gradients if gradient is not None]
    if group.world_size == 1 or not present:
        return list(gradients)
    flat = _flatten_dense_tensors(present)
    all_reduce_sum(flat, group)
    flat /= group.world_size
    means = iter(_unflatten_dense_tensors(flat, present))
    return [None if gradient is None else next(means) for gradient in gradients]


def put(parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor | None]) -> None:
    """In the parameter's own memory order, as autograd leaves a gradient itself: fused optimizers read both by address."""
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
    """How a step of the training changes the parameters. `measures_noise`: and measures the gradient noise, if it can."""
    if len(optimizers) > 1 or "task" not in optimizers[0].losses:  # of an init stage, whose losses may not reach all parameters
        return PerLossUpdate(module, optimizers, settings)
    ddp_module = wrap(module, settings.group)
    noise = GradientNoise(ddp_module, settings.group) if measures_noise else None
    return SharedUpdate(ddp_module, optimizers[0], settings, noise=noise, allreduce_wait=allreduce_wait)


def wrap(model: nn.Module, group: Group) -> nn.Module:
    """`model` under DDP where there are several ranks."""
    if group.world_size == 1:
        return model
    # Ranks need not agree on batch norm's statistics before an evaluation, which takes rank 0's, as a checkpoint does.
    signature = inspect.signature(DistributedDataParallel)  # torch 2.14 renamed the option
    option = "forward_sync_buffers" if "forward_sync_buffers" in signature.parameters else "broadcast_buffers"
    unshared: dict[str, Any] = {option: False}
    ids = [group.device] if group.device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=ids, process_group=group.process_group, gradient_as_bucket_view=True, **unshared
    )
