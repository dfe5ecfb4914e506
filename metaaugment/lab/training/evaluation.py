"""How well a network does on a split."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metaaugment.distributed import add_up


@dataclass(frozen=True)
class Score:
    """Cross-entropy, and the shares of samples whose label is the network's first choice or among its first five."""

    loss: float
    top1: float
    top5: float


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """A context in evaluation mode, with running statistics; afterwards each module is back in its own mode."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():  # one by one: some may have been frozen in evaluation mode
            module.training = training


@torch.no_grad()
def evaluate(
    network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], prepare: Callable[[Tensor], Tensor]
) -> Score:
    """Score a network in evaluation mode over the batches of all processes; waits for the device once, at the end."""
    sums = torch.zeros(4, dtype=torch.float64, device=next(network.parameters()).device)
    with evaluating(network):
        for images, labels in batches:
            logits = network(prepare(images))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            count = torch.full_like(loss, len(labels))
            sums += torch.stack([value.double() for value in (loss, best[:, 0].sum(), best.sum(), count)])
    add_up([sums])
    *found, count = sums.tolist()
    if count == 0:
        raise ValueError("no image of a split can be read, so there is nothing to evaluate on; repair the files")
    return Score(*(value / count for value in found))
