"""The few collectives that the method needs; with one process each of them does nothing.

The paper's mini-batch is the global one: weights are normalised over it, gradients are summed over it, and random
draws are made for it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import get_worker_info


class Parted(RuntimeError):
    """Another process of the run is gone, or did not answer in time."""

    def __init__(self) -> None:
        super().__init__("another process of this run is gone, or did not answer in time")


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The index of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def share(n: int) -> slice:
    """This process's slice of n items; the slices of all processes partition them."""
    return slice(rank() * n // world_size(), (rank() + 1) * n // world_size())


def drawn(draw: Callable[[int], Any], n: int) -> Any:
    """This process's n of the draws for the global mini-batch.

    If the processes' generators are in step, the draws are those that a single process would make; if not, each
    process still has draws of its own.
    """
    return draw(n) if world_size() == 1 else draw(n * world_size())[rank() * n : (rank() + 1) * n]


def total(value: Tensor) -> Tensor:
    """Differentiable all-reduce by sum; gradients are summed too, since each process's loss depends on every value."""
    return value if world_size() == 1 else _Total.apply(value)


def whole_length(part: Tensor) -> Tensor:
    """How many rows the global batch has, of which this is a process's part."""
    return total(torch.full((), len(part), dtype=part.dtype, device=part.device))


def gathered(value: Tensor) -> Tensor:
    """Differentiable all-gather: the values of all processes, stacked to [processes, …].

    Costs more than an all-gather, being a `total` of mostly zeros, but, like `total`, is differentiable in every mode.
    """
    return total(torch.stack([value if place == rank() else torch.zeros_like(value) for place in range(world_size())]))


def add_up(tensors: Sequence[Tensor]) -> None:
    """In-place all-reduce: each tensor becomes its sum over all processes."""
    if world_size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    with together():
        dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def bare(network: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel, whose reducer expects one backward pass per forward pass."""
    inner = getattr(network, "_orig_mod", network)  # torch.compile's wrapper
    return inner.module if isinstance(inner, DistributedDataParallel) else network


def is_compiled(network: nn.Module) -> bool:
    """Whether it is wrapped by torch.compile, outside of DistributedDataParallel or inside."""
    return hasattr(network, "_orig_mod") or hasattr(bare(network), "_orig_mod")


def plain(network: nn.Module) -> nn.Module:
    """The network as its author wrote it, without wrappers for several processes or compilation."""
    network = bare(network)
    return getattr(network, "_orig_mod", network)


def agree(tensors: Sequence[Tensor]) -> None:
    """In-place broadcast from rank 0, as DistributedDataParallel does for the network."""
    if world_size() > 1:
        with together():
            for tensor in tensors:
                dist.broadcast(tensor.data, 0)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Turn a collective's error into `Parted`, whatever the backend; refuse a collective in a worker: it would hang."""
    if get_worker_info() is not None:
        raise RuntimeError(
            "a data loader's worker cannot reach the other processes of the run; compute only images in the worker, by "
            "policy.transform(images) or PolicyTransform, and weights in the training loop"
        )
    try:
        yield
    except RuntimeError as error:
        raise Parted from error


class _Total(torch.autograd.Function):
    """All-reduce by sum, which is its own derivative, backward and forward, to any order."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        value = value.clone(memory_format=torch.contiguous_format)
        with together():
            dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return _Total.apply(gradients[0])

    @staticmethod
    def jvp(ctx: object, *tangents: Tensor) -> Tensor:
        return _Total.apply(tangents[0])
