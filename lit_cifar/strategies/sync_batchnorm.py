"""Synchronised BatchNorm on the CPU: `--trainer.sync_batchnorm=true` without a GPU, in all modes that take it.

torch's `nn.SyncBatchNorm` refuses CPU tensors. The layers here normalise a batch that is spread unevenly over processes
as `nn.BatchNorm` normalises the whole of it (Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167). The gradient is
autograd's: sums over the processes hand it on to all of them.
"""

from typing import cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import TorchSyncBatchNorm
from torch import Tensor, nn

from lit_cifar import internals
from lit_cifar.errors import clash
from lit_cifar.strategies.tp import summed


class ProcessSyncBatchNorm(TorchSyncBatchNorm):
    """Lightning's layer-sync plugin for every device: `nn.SyncBatchNorm` on CUDA, this file's layers on the CPU.

    On the CPU only the class of layers is swapped, until `revert`. A Trainer with it synchronises without the flag.
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


class _Synchronised(internals.BatchNorm):  # type: ignore[misc]
    """BatchNorm with training statistics over the batches of all processes."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (n, C, ...); n may differ between processes and be 0 in some. Each process must take part.

        Squares are those of deviations from the mean, as squares of values would cancel. Sums are in float64, which
        keeps counts exact, the rest in float32 or the input's dtype, if that is more precise.
        """
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return cast(Tensor, super().forward(input))
        self._check_input_dim(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        per_channel, others = (1, -1, *[1] * (x.dim() - 2)), [dim for dim in range(x.dim()) if dim != 1]
        own_count = x.new_tensor([x.numel() // x.shape[1]], dtype=torch.float64)
        sums = summed(torch.cat([own_count, x.sum(others, dtype=torch.float64)]))
        if (count := sums[0]) < 2:
            problem = f"Expected more than 1 value per channel when training, got {int(count)} over all processes"
            raise ValueError(problem)
        mean = sums[1:] / count
        deviations = x - mean.to(x.dtype).view(per_channel)
        var = summed(deviations.square().sum(others, dtype=torch.float64)) / count
        self._track(count, mean, var)
        output: Tensor = deviations * (var + self.eps).rsqrt().to(x.dtype).view(per_channel)
        if self.affine:
            output = output * self.weight.view(per_channel) + self.bias.view(per_channel)
        return output.to(input.dtype)

    @torch.no_grad()
    def _track(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
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
