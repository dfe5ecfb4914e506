"""The collectives of a run, besides those of the method: what its processes tell one another."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from metaaugment.distributed import add_up, rank, together, world_size

T = TypeVar("T")


def leave_to_first(tensors: Sequence[Tensor]) -> None:
    """Reduce to rank 0 in place: the first process holds the sum, and the others continue from zero."""
    add_up(tensors)
    if rank() > 0:
        for tensor in tensors:
            tensor.zero_()


def collected(tensor: Tensor) -> Tensor:
    """All-gather of rows, concatenated; every process must have the same number. Not differentiable."""
    if world_size() == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world_size())]
    with together():
        dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def highest(number: int) -> int:
    """All-reduce by maximum of a number on the host: waits for the other processes, but for no device."""
    if world_size() == 1:
        return number
    value = torch.tensor(number)
    with together():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def everyone(value: T) -> list[T]:
    """All-gather of objects: the values of all processes, of any type that can be pickled."""
    values: list[Any] = [value]
    if world_size() > 1:
        values = [None] * world_size()
        with together():
            dist.all_gather_object(values, value)
    return values


def first(function: Callable[[], T]) -> T:
    """Broadcast what a function returns on rank 0; an OSError or ValueError raised there is raised on all processes."""
    if world_size() == 1:
        return function()
    found: list[Any] = [None, None]
    if rank() == 0:
        try:
            found[0] = function()
        except OSError as error:
            found[1] = error
        except ValueError as error:
            found[1] = ValueError(str(error))  # the base class: not every subclass can be pickled
    with together():
        dist.broadcast_object_list(found, 0)
    if found[1] is not None:
        raise found[1]
    return found[0]
