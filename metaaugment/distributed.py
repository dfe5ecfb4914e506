"""The few collectives that the method needs; with one process each of them does nothing.

The paper's mini-batch is the global one: weights are normalised over it, and gradients are summed over it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def total(value: Tensor) -> Tensor:
    """The sum over all processes, differentiable: each process's loss depends on every process's value."""
    return value if world_size() == 1 else _Total.apply(value)


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes."""
    if world_size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def bare(network: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel, whose reducer counts on one backward pass a forward pass."""
    inner = getattr(network, "_orig_mod", network)  # of torch.compile
    return inner.module if isinstance(inner, DistributedDataParallel) else network


def agree(tensors: Sequence[Tensor]) -> None:
    """Give all processes the first one's values, as DistributedDataParallel does for the network."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor.data, 0)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return _Total.forward(ctx, gradients[0])
