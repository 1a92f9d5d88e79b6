"""Synchronised BatchNorm on the CPU: `--trainer.sync_batchnorm=true` for `ddp` and `ddp_spawn` without a GPU.

torch's `nn.SyncBatchNorm` refuses CPU tensors. The layers here normalise a batch that is spread unevenly over processes
as `nn.BatchNorm` normalises the whole of it, one message per layer in forward and one in backward. Formulas: Ioffe and
Szegedy 2015 (https://arxiv.org/abs/1502.03167); what is summed where: torch/nn/modules/_functions.py.
"""

from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lit_cifar import internals
from lit_cifar.errors import clash

Statistics = tuple[int, Tensor, Tensor]  # values per channel, their mean (C,) and their biased variance (C,)


class ProcessSyncBatchNorm(TorchSyncBatchNorm):
    """Lightning's layer-sync plugin for every device: `nn.SyncBatchNorm` on CUDA, this file's layers on the CPU.

    On the CPU only the class of each layer is swapped, until `revert`: parameters, buffers and names stay. A Trainer
    given this plugin synchronises, whatever its `sync_batchnorm` says.
    """

    def apply(self, model: nn.Module) -> nn.Module:
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, internals.BatchNorm)]
        for name, layer in layers:
            if type(layer).forward not in (internals.BatchNorm.forward, nn.SyncBatchNorm.forward):
                kept = f"{name}, a {type(layer).__name__}"
                raise clash("--trainer.sync_batchnorm=true", kept, "what it computes beside BatchNorm would be lost")
        if _device_to_be(model).type != "cpu":
            return super().apply(model)
        for _, layer in layers:
            layer.__class__ = type(f"Synced{type(layer).__name__}", (_Synchronised, type(layer)), {})
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        if isinstance(model, _Synchronised):  # the base class calls this for every child in turn
            model.__class__ = type(model).__bases__[1]
        return super().revert(model)


def synchronise_along(network: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the synchronised layers of `network` communicate with the processes of `group` instead of all."""
    for layer in network.modules():
        if isinstance(layer, _Synchronised | nn.SyncBatchNorm):
            layer.process_group = group


class _Synchronised(internals.BatchNorm):  # type: ignore[misc]
    """BatchNorm with training statistics over the batches of the processes in `process_group`, None for all."""

    process_group: dist.ProcessGroup | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (n, C, ...); n may differ between processes and be 0 in some. Each process must take part."""
        group = self.process_group
        if not (self.training and dist.is_initialized() and dist.get_world_size(group) > 1):
            return cast(Tensor, super().forward(input))
        self._check_input_dim(input)
        statistics = _global_statistics(input.detach(), group)
        self._track(*statistics)
        output: Tensor = _Normalise.apply(input, self.weight, self.bias, statistics, self.eps, group)
        return output

    def _track(self, count: int, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics as `nn.BatchNorm` does: by `momentum`, or as a plain average if it is None."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        step = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), step)
        self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), step)


def _device_to_be(model: nn.Module) -> torch.device:
    """The device on which `model` will train: DDPStrategy calls `apply` before it moves the model there."""
    if isinstance(model, L.LightningModule) and model._trainer is not None:
        return model.trainer.strategy.root_device
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _global_statistics(x: Tensor, group: dist.ProcessGroup | None) -> Statistics:
    """Count, mean and variance of x (n, C, ...) over the processes of `group`, None for all.

    Each process sends its own, and all combine them in the same order, so that all get the same bits. The combination
    (Chan, Golub and LeVeque 1979) adds squared deviations from means, never squares of values, which would cancel, in
    float64, which keeps counts exact. The result has x's dtype, or float32 where that has less precision.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    num_channels = x.shape[1]
    local = torch.zeros(1 + 2 * num_channels, dtype=torch.float64, device=x.device)
    if x.numel():
        # The kernel of nn.BatchNorm: four times as fast on the CPU as torch.var_mean, and summed in float64.
        mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
        local[0] = x.numel() // num_channels
        local[1:] = torch.cat([mean, var])
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    counts, means, variances = torch.split(torch.stack(parts), [1, num_channels, num_channels], dim=1)
    count = int(counts.sum())
    if count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got {count} over all processes")
    mean = (counts * means).sum(dim=0) / count
    var = (counts * (variances + (means - mean).square())).sum(dim=0) / count
    return count, mean.to(wide.dtype), var.to(wide.dtype)


class _Normalise(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps) * weight + bias`, differentiated through the dependence of mean and var on x.

    Every process's x moves the statistics of all, so the gradient of x needs sums over all processes. The gradients of
    weight and bias are this process's share only: DistributedDataParallel averages those itself.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, eps: float, group: Any
    ) -> Tensor:
        ctx.count, mean, var = statistics
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.group, ctx.has_bias = eps, group, bias is not None
        return _evaluate(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        local = _local_sums(grad, x, mean, var, eps=ctx.eps)
        total = local.clone()
        dist.all_reduce(total, group=ctx.group)
        scale = torch.rsqrt(var + ctx.eps)
        if weight is not None:
            scale = scale * weight
        # dx = scale * (dy - mean(dy) - x_hat * mean(dy * x_hat)), the means taken over all processes.
        mean_dy_x_hat, mean_dy = total / ctx.count
        through_statistics = _evaluate(x, mean, var, -scale * mean_dy_x_hat, -scale * mean_dy, eps=ctx.eps)
        per_channel = (1, -1) + (1,) * (x.dim() - 2)
        grad_x = torch.addcmul(through_statistics, grad, scale.to(grad.dtype).view(per_channel))
        grad_weight = local[0] if weight is not None else None
        grad_bias = local[1] if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _evaluate(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    """`x_hat * weight + bias` with the kernel of evaluation mode, in one pass; the dtype of x is kept."""
    weight, bias = (None if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
    return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)


def _local_sums(grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, *, eps: float) -> Tensor:
    """This process's sums of `dy * x_hat` and of `dy` per channel, (2, C): the gradients of weight and bias."""
    if not x.numel():
        return mean.new_zeros(2, len(mean))
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad.to(mean.dtype), x.to(mean.dtype), None, mean, var, None, None, False, eps, [False, True, True]
    )
    return torch.stack([grad_weight, grad_bias])
