"""Batch normalization over the global batch, for any number of workers, on CPU and GPU.

torch's SyncBatchNorm supports only GPUs, and waits for the device in every layer. This module uses its kernels without waiting,
with half-precision input and output, and plain operations on a CPU. A rank may have no rows.

Shapes: B rows of this rank, C channels, then any further dimensions; W ranks.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainables.distributed.group import Group, all_reduce_sum
from trainables.errors import ModelError


def runs_on_kernels(input: Tensor) -> bool:
    """Return whether torch has kernels for synchronized batch norm on this device."""
    return input.is_cuda


class _AllReduce(torch.autograd.Function):
    """Sum over the ranks of a group; the gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce_sum(local.clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(gradients[0].clone(), ctx.group), None


class Statistics(NamedTuple):
    """Mean and variance of a batch per channel."""

    mean_C: Tensor
    var_C: Tensor
    """Biased."""
    num_values: Tensor
    """Values per channel, over all ranks (scalar), at least 1."""


def merge_statistics(mean_WC: Tensor, var_WC: Tensor, num_values_W: Tensor) -> Statistics:
    """Merge the statistics of all ranks. A rank without values sends zeros.

    Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    num_values = num_values_W.sum().clamp(min=1)  # no rank may have a row
    share_W1 = (num_values_W / num_values)[:, None]
    mean_C = (share_W1 * mean_WC).sum(0)
    return Statistics(mean_C, (share_W1 * (var_WC + (mean_WC - mean_C).square())).sum(0), num_values)


class _NormalizeOnGpu(torch.autograd.Function):
    """Batch norm with the kernels of torch's SyncBatchNorm. A rank without rows runs none of them."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float, group: Group
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalized input (B, C, …), in its dtype, and the `Statistics`."""
        input = input.contiguous(memory_format=_kernel_format(input))
        num_channels, has_rows = input.shape[1], input.numel() > 0
        local = torch.zeros(2 * num_channels + 1, dtype=weight_C.dtype, device=input.device)
        if has_rows:
            mean_C, invstd_C = torch.batch_norm_stats(input, eps)
            num_values = local[-1:].fill_(input.numel() / num_channels)
            local = torch.cat([mean_C, invstd_C.pow(-2).sub(eps).clamp(min=0), num_values])
        gathered = local.new_empty(group.world_size * len(local))
        dist.all_gather_into_tensor(gathered, local, group=group.process_group)
        mean_WC, var_WC, num_values_W1 = gathered.view(group.world_size, -1).split([num_channels, num_channels, 1], 1)
        merged = merge_statistics(mean_WC, var_WC, num_values_W1[:, 0])
        invstd_C = torch.rsqrt(merged.var_C + eps)
        ctx.group = group
        ctx.save_for_backward(input, weight_C, merged.mean_C, invstd_C, num_values_W1[:, 0].int())
        ctx.mark_non_differentiable(*merged)
        output = torch.batch_norm_elemt(input, weight_C, bias_C, merged.mean_C, invstd_C, eps) if has_rows else input.clone()
        return output, *merged

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        input, weight_C, mean_C, invstd_C, num_values_W = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=_kernel_format(input))
        sums_2C, weight_gradient_C, bias_gradient_C = (
            mean_C.new_zeros(2 * len(mean_C)),
            torch.zeros_like(mean_C),
            torch.zeros_like(mean_C),
        )
        if input.numel():
            *sums, weight_gradient_C, bias_gradient_C = torch.batch_norm_backward_reduce(
                gradient, input, mean_C, invstd_C, weight_C, True, True, True
            )
            sums_2C = torch.cat(sums)
        sum_dy_C, sum_dy_xmu_C = all_reduce_sum(sums_2C, ctx.group).chunk(2)
        if input.numel():
            gradient = torch.batch_norm_backward_elemt(
                gradient, input, mean_C, invstd_C, weight_C, sum_dy_C, sum_dy_xmu_C, num_values_W
            )
        return gradient, weight_gradient_C, bias_gradient_C, None, None


def _kernel_format(input: Tensor) -> torch.memory_format:
    is_channels_last = input.ndim == 4 and input.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_channels_last else torch.contiguous_format


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over the rows of all ranks (Ioffe and Szegedy 2015, algorithm 1); torch's own in eval mode or on one rank."""

    def __init__(self, num_features: int, group: Group, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self._group = group

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the input (B, C, …), and update running statistics in training mode. All ranks must make the same calls."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        is_alone = self._group.world_size == 1 and input.numel() > input.shape[1]  # torch's raises for a single value per channel
        if not self.training or is_alone:
            return super().forward(input)
        if self._group.world_size > 1 and runs_on_kernels(input):
            output: Tensor
            output, *merged = _NormalizeOnGpu.apply(input, self.weight, self.bias, self.eps, self._group)  # type: ignore[no-untyped-call]
            self._update_running_statistics(*merged)
            return output
        dtype = input.dtype
        input = input if dtype == torch.float64 else input.float()  # sums could overflow in half precision
        axes = (0, *range(2, input.ndim))
        view = (1, -1, *([1] * (input.ndim - 2)))
        count = torch.full((1,), input.numel() / input.shape[1], dtype=input.dtype, device=input.device)
        sums = self._sum_over_ranks(torch.cat([input.sum(axes), count]))
        count = sums[-1].clamp(min=1)  # no rank may have a row
        mean_C = sums[:-1] / count
        centered = input - mean_C.view(view)
        var_C = self._sum_over_ranks(centered.square().sum(axes)) / count
        self._update_running_statistics(mean_C.detach(), var_C.detach(), count.detach())
        scale_C = self.weight * torch.rsqrt(var_C + self.eps)
        return torch.addcmul(self.bias.view(view), centered, scale_C.view(view)).to(dtype)

    def _sum_over_ranks(self, local: Tensor) -> Tensor:
        if self._group.world_size == 1:
            return local
        total: Tensor = _AllReduce.apply(local, self._group)  # type: ignore[no-untyped-call]
        return total

    @torch.no_grad()
    def _update_running_statistics(self, mean_C: Tensor, var_C: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        unbiased_C = var_C * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), self.momentum or 0.0)
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), self.momentum or 0.0)
        self.num_batches_tracked.add_(1)


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def _move_hooks(module: nn.Module, replaced: nn.Module) -> None:
    for hooks in _HOOKS:  # keep the same mapping, since hook handles refer to it
        setattr(module, hooks, getattr(replaced, hooks))


def convert(model: nn.Module, group: Group, key: str = "scale.sync_batch_norm", off: str = "false") -> nn.Module:
    """Replace every batch norm of `model` by one over all ranks, in place, with the same parameters, statistics and hooks.

    The supported classes are those of `KINDS`. For error messages, `key` is the option that requires this, and `off` its value
    that does not.

    Raises ModelError: the model has a batch norm of another class.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if not isinstance(child, nn.modules.batchnorm._BatchNorm) or isinstance(child, GlobalBatchNorm):
                continue
            kind = KINDS.get(f"{type(child).__module__}.{type(child).__name__}")
            if kind is None or child.momentum is None or not child.affine or not child.track_running_stats:
                raise ModelError(
                    f"{key}: {type(model).__name__} has an unsupported batch norm, {type(child).__name__}: "
                    f"set {key} to {off}, or choose another model"
                )
            norm = kind(child.num_features, group, child.eps, child.momentum).to(child.weight.device, child.weight.dtype)
            norm.load_state_dict(child.state_dict())
            norm.weight, norm.bias = child.weight, child.bias
            for part, module in child.named_children():
                setattr(norm, part, module)
            _move_hooks(norm, child)
            setattr(parent, name, norm.train(child.training))
    return model


def use_batch_statistics(frozen: nn.Module, group: Group, key: str) -> None:
    """Make the batch norms of a `frozen` model normalize by the global batch while they are in training mode.

    Running statistics do not change. `key` is the option that requires this. Raises ModelError: see `convert`.
    """
    for module in convert(frozen, group, key, "running").modules():
        if isinstance(module, GlobalBatchNorm):
            module.momentum = 0.0


def has_local_batch_norm(model: nn.Module) -> bool:
    """Return whether `model` has a batch norm over this rank's rows only, which raises without rows."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and not isinstance(m, GlobalBatchNorm) for m in model.modules())


def accepts_empty_batches(model: nn.Module) -> bool:
    """Return whether `model` can run on no images: it has batch norms, and all are global.

    A model without batch norms may reshape by the number of images, which fails for 0.
    """
    return any(isinstance(m, GlobalBatchNorm) for m in model.modules()) and not has_local_batch_norm(model)


def has_global_batch_norm(model: nn.Module) -> bool:
    """Return whether `model` has a batch norm over all ranks."""
    return any(isinstance(module, GlobalBatchNorm) for module in model.modules())


class GlobalBatchNorm1d(GlobalBatchNorm):
    """For (B, C) or (B, C, L)."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim in (2, 3), tuple(input.shape)


class GlobalBatchNorm2d(GlobalBatchNorm):
    """For (B, C, H, W)."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim == 4, tuple(input.shape)


class GlobalBatchNormAct2d(GlobalBatchNorm2d):
    """timm's `BatchNormAct2d`: batch norm, then dropout and an activation."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


KINDS: dict[str, type[GlobalBatchNorm]] = {
    "torch.nn.modules.batchnorm.BatchNorm1d": GlobalBatchNorm1d,
    "torch.nn.modules.batchnorm.BatchNorm2d": GlobalBatchNorm2d,
    "timm.layers.norm_act.BatchNormAct2d": GlobalBatchNormAct2d,
}
"""Batch norm class → its replacement over all ranks."""
