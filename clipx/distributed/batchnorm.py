"""Synchronized BatchNorm: statistics over the samples of all ranks.

On CUDA it is timm's and torch's implementation; on the CPU, which they reject, the implementation below.

Shape suffixes: N samples, C channels, ... positions within a sample.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d, convert_sync_batchnorm
from torch import Tensor, nn

from clipx.distributed.comm import Comm
from clipx.errors import ConfigError, require_effect
from clipx.model.batchnorm import BATCH_NORM


def synchronize(model: nn.Module, comm: Comm) -> None:
    """Replaces the model's BatchNorm modules; their names, parameters and state do not change.

    Raises ConfigError for one rank, a model without trainable BatchNorm, or a type that the device does not support.
    """
    norms = {name: m for name, m in model.named_modules() if isinstance(m, BATCH_NORM) and m.training}
    given, fix = "distributed.sync_batchnorm=true", "remove it, or"
    require_effect(
        bool(norms), given, "on a model without BatchNorm, or with all of it locked", f"{fix} choose a ResNet"
    )
    require_effect(comm.world > 1, given, "on one rank", f"{fix} start several ranks with torchrun")
    if comm.device.type == "cuda":
        for tower in model.children():  # the conversion replaces modules below its argument, never the argument itself
            convert_sync_batchnorm(tower)
        return
    for name, norm in norms.items():
        model.set_submodule(name, _synchronized(norm, comm.device))


def _synchronized(norm: nn.Module, device: torch.device) -> nn.BatchNorm2d:
    """Returns a synchronized module with the parameters, buffers and options of `norm`. Raises ConfigError."""
    options = {name: getattr(norm, name) for name in ("eps", "momentum", "affine", "track_running_stats")}
    if type(norm) is nn.BatchNorm2d:
        found: nn.BatchNorm2d = _SyncedBatchNorm2d(norm.num_features, **options, device="meta")
    elif type(norm) is BatchNormAct2d:
        found = _SyncedBatchNormAct2d(norm.num_features, **options, device="meta")
        found.drop, found.act = norm.drop, norm.act
    else:
        raise ConfigError(
            f"distributed.sync_batchnorm=true does not support {type(norm).__name__} on {device.type}: train on cuda, "
            "or drop it"
        )
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(found, name, getattr(norm, name))
    return found


class _Sum(torch.autograd.Function):
    """All-reduce sum, differentiable any number of times; the backward pass sums the gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        summed: Tensor = _Sum.apply(grad)  # a function again, so that second derivatives are sums over the ranks, too
        return summed


def _normalize(norm: nn.BatchNorm2d, x_NC: Tensor) -> Tensor:
    """Normalizes x [N, C, ...] by each channel's mean and variance over all ranks' samples. Returns x's dtype."""
    dims = [0, *range(2, x_NC.ndim)]
    shape = [1, -1, *[1] * (x_NC.ndim - 2)]
    wide_NC = x_NC.to(torch.promote_types(x_NC.dtype, torch.float32))
    channels = x_NC.shape[1]
    local_count = wide_NC.new_full((1,), x_NC.numel() / channels)
    total = _Sum.apply(torch.cat([wide_NC.sum(dims), local_count]))
    count = total[-1].detach()
    centred_NC = wide_NC - (total[:-1] / count).view(shape)
    var_C = _Sum.apply(centred_NC.square().sum(dims)) / count
    with torch.no_grad():
        _update_running_stats(norm, total[:-1] / count, var_C * count / (count - 1))
    out_NC = centred_NC * torch.rsqrt(var_C + norm.eps).view(shape)
    if norm.affine:
        out_NC = out_NC * norm.weight.view(shape) + norm.bias.view(shape)
    normalised_NC: Tensor = out_NC.to(x_NC.dtype)
    return normalised_NC


def _update_running_stats(norm: nn.BatchNorm2d, mean_C: Tensor, var_C: Tensor) -> None:
    """Updates the running averages as BatchNorm does. Momentum 0 pauses them."""
    if norm.running_mean is None or norm.running_var is None:
        return
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked += 1
    momentum = norm.momentum
    if momentum is None:  # cumulative average over all batches
        assert norm.num_batches_tracked is not None
        momentum = 1 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean_C.to(norm.running_mean.dtype), momentum)
    norm.running_var.lerp_(var_C.to(norm.running_var.dtype), momentum)


class _SyncedBatchNorm2d(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return _normalize(self, input) if self.training else super().forward(input)


class _SyncedBatchNormAct2d(BatchNormAct2d):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.drop(_normalize(self, x))) if self.training else super().forward(x)
        return out
