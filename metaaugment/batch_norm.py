"""Batch normalisation by the statistics of the global mini-batch, on any device and by every route.

torch's SyncBatchNorm is for GPUs, and its backward pass cannot be differentiated; here the statistics are summed over
all processes by a collective that can be differentiated in every mode.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metaaugment.distributed import gathered, world_size

KNOWN_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class GlobalBatchNorm(_BatchNorm):
    """torch's BatchNorm1d, 2d and 3d over the samples of all processes; with one process it is just that."""

    def forward(self, input: Tensor) -> Tensor:
        by_batch = self.training or self.running_mean is None
        if world_size() == 1 or not by_batch:
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        mean, variance, count = statistics(x)
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * count / (count - 1))
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        shape = (1, -1, *[1] * (x.ndim - 2))
        y = (x - mean.view(shape)) * scale.view(shape)
        return (y if self.bias is None else y + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics as torch does, with the unbiased variance."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = 1 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
            kept.add_((rate * (new - kept)).to(kept.dtype))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"the input has shape {tuple(input.shape)}; it must be [n, channels, …]")


def statistics(x: Float[Tensor, "n c ..."]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel, and the number of values, over all processes.

    Computed from each process's mean and variance, not from sums of squares, whose difference would cancel.
    """
    dims = [0, *range(2, x.ndim)]
    variance, mean = torch.var_mean(x, dims, correction=0)
    count = x.numel() // x.shape[1]
    means, variances, counts = gathered(torch.stack([mean, variance, torch.full_like(mean, count)])).unbind(1)
    parts = counts / counts.sum(0)
    mean = (parts * means).sum(0)
    return mean, (parts * (variances + (means - mean).square())).sum(0), counts.sum(0)


def with_global_statistics(network: nn.Module) -> nn.Module:
    """The same network with its batch normalisation over all processes; parameters are shared, not copied.

    The names in its state do not change, so a checkpoint fits any number of processes.
    """
    made: dict[nn.Module, nn.Module] = {}
    for path, module in network.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, GlobalBatchNorm | nn.SyncBatchNorm):
            if type(module) not in KNOWN_KINDS:
                raise ValueError(
                    f"layer {path!r} is a {type(module).__name__}, whose statistics cannot be summed over all "
                    "processes; use a torch.nn.BatchNorm, or leave its statistics to each process"
                )
            made[module] = _global(module)
    for module in list(network.modules()):
        for name, child in module._modules.items():
            if child in made:
                module._modules[name] = made[child]
    return made.get(network, network)


def _global(module: _BatchNorm) -> GlobalBatchNorm:
    new = GlobalBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    for name in (*new._parameters, *new._buffers):
        setattr(new, name, getattr(module, name))
    return new.train(module.training)
