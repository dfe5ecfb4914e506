"""How well a network does on a split."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Score:
    """Cross-entropy, and shares of samples whose label is the network's first, or among its first five, choices."""

    loss: float
    top1: float
    top5: float


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """In evaluation mode, with running statistics; afterwards each part is in the mode it was in."""
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
    """In evaluation mode; the host waits for the device once, at the end."""
    sums, count = None, 0
    with evaluating(network):
        for images, labels in batches:
            logits = network(prepare(images)).float()
            best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            new = torch.stack([loss.double(), best[:, 0].sum().double(), best.sum().double()])
            sums = new if sums is None else sums + new
            count += len(labels)
    if sums is None:
        raise ValueError("no image of a split can be read, so that there is nothing to evaluate on; mend the files")
    return Score(*(sums / count).tolist())
