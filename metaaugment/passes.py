"""The passes of the task network in one step: the training pass, the same repeated, and the validation pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from metaaugment.algorithm import inner_gradient
from metaaugment.alignment import Pass
from metaaugment.distributed import add_up, bare, share, total, world_size
from metaaugment.guard.checks import Checks, check_losses, check_pair
from metaaugment.guard.gradients import filled
from metaaugment.guard.parameters import at_expectation, refuse_cached_weights
from metaaugment.guard.replay import Buffers, FirstPass, Replay, copied_buffers, undisturbed
from metaaugment.observation import Observation


def cross_entropy(logits: Tensor, labels: Tensor) -> Float[Tensor, " n"]:
    return F.cross_entropy(logits, labels, reduction="none")


class Trained(NamedTuple):
    """The training pass of a mini-batch."""

    logits: Float[Tensor, "n classes"]
    losses: Float[Tensor, " n"]
    buffers: Buffers  # from before the pass


@dataclass(frozen=True)
class Passes:
    """Passes of a network with parameters w.

    Args:
        loss: from logits and labels to one loss per sample.
        prepare: from images to the network's inputs.
        part: the largest number of validation images in one pass; None for no limit.
        dtype: of differences, and of counts.
    """

    network: nn.Module
    w: Mapping[str, nn.Parameter]
    loss: Callable[[Tensor, Tensor], Tensor]
    prepare: Callable[[Tensor], Tensor]
    part: int | None
    dtype: torch.dtype
    first: FirstPass
    checks: Checks

    def train(self, inputs: Tensor, labels: Tensor, replay: Replay) -> Trained:
        """The pass that w is trained by, recorded so that it can be repeated."""
        buffers = copied_buffers(bare(self.network))
        refuse_cached_weights()
        with replay.first(), self.first.watched(replay):
            before = inputs._version
            logits = self.network(inputs)
            if inputs._version != before:  # a repeated pass would start from other inputs
                raise ValueError("the network changes its input in place; let it work on a copy, as x = x - mean does")
            return Trained(logits, self.losses(logits, labels, "training"), buffers)

    def again(self, seen: Observation) -> Pass:
        """The training pass of a mini-batch, for the routes, which repeat it at other parameters."""
        network = bare(self.network)

        def again() -> Tensor:
            with seen.replay.again(), undisturbed(network, buffers=[seen.buffers]):
                return network(seen.inputs).to(self.dtype)

        def losses(logits: Tensor) -> Tensor:
            with torch.autocast(logits.device.type, enabled=False):
                return self.loss(logits, seen.labels)

        precision = seen.replay.rounding(self.first.coarsest)
        return Pass(network, list(self.w.values()), seen.logits, again, losses, precision)

    def validation_gradient(self, images: Tensor, labels: Tensor, replay: Replay) -> list[Tensor]:
        """∇ L_val at the current parameters, with batch statistics as in training; buffers do not change.

        In the precision of the training pass, which is `replay`'s.
        """
        network, w = bare(self.network), list(self.w.values())
        # Each process has its share of the validation batch; the sum over processes is the mean over the whole batch.
        count = total(torch.full((), len(images), dtype=self.dtype, device=images.device))
        v: list[Tensor] = []
        with undisturbed(network), at_expectation(network):  # backward too, where checkpointing repeats the pass
            for part in self._parts(len(images), count):
                some, theirs = images[part], labels[part]
                with torch.autocast(images.device.type, replay.precision, replay.autocast, cache_enabled=False):
                    losses = self.losses(network(self.prepare(some)), theirs, "validation")
                mean = torch.ones_like(losses) / count.to(losses.dtype)
                own = filled(inner_gradient(mean, losses, w, retain_graph=False), w)
                v = list(torch._foreach_add(v, own)) if v else own
        add_up(v)
        return v

    def _parts(self, n: int, count: Tensor) -> list[slice]:
        """The parts of this process's share of a validation batch: each of m parts takes every m-th image of the global
        batch, so that a part and its batch statistics are the same for any number of processes."""
        if self.part is None:
            return [slice(n)]
        whole, begins = (n, 0) if world_size() == 1 else (int(count), share(int(count)).start)
        parts = -(-whole // self.part)
        return [slice((part - begins) % parts, n, parts) for part in range(parts)]

    def losses(self, logits: Tensor, labels: Tensor, what: str) -> Float[Tensor, " n"]:
        self.checks.values(what, lambda: check_pair(logits, labels, what, self.loss is cross_entropy))
        losses = self.loss(logits, labels)
        check_losses(losses, labels, what)
        return losses
