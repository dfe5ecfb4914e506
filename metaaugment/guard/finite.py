"""Gradients that are not finite: they are left out and counted."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metaaugment.distributed import total
from metaaugment.guard.gradients import norm
from metaaugment.guard.replay import capturing


class FiniteGuard:
    """Keeps gradients that are not finite from having an effect.

    While a step is captured, the host cannot check. The count stays on the device, and a fused optimizer, which reads
    `found` there, leaves the step out by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.count = torch.zeros((), dtype=torch.long, device=device)  # gradients left out so far
        self.found: Tensor | None = None  # in a captured step: 1 if the last gradients were not finite
        self._void = False  # whether the gradient that the last backward pass left was not finite

    def begin(self) -> None:
        """A step begins."""
        self._void = False

    def passes(self, gradients: Sequence[Tensor]) -> bool:
        finite = total(norm(gradients)).isfinite()  # over all processes, as each may have only a part
        self.count += ~finite
        if capturing(self.device):
            self.found = (~finite).float()
            return True
        if not (ok := bool(finite)):
            warnings.warn(
                "a gradient is not finite and has no effect; learner.skipped counts them",  # a fixed text: shown once
                stacklevel=3,
            )
        return ok

    def watch(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Check `.grad` once the backward pass of the loss, DistributedDataParallel's part included, is over."""
        engine = torch.autograd.Variable._execution_engine

        def check() -> None:
            gradients = [w.grad for w in parameters if w.grad is not None]
            if gradients and not self.passes(gradients):
                torch._foreach_zero_(gradients)
                self._void = True

        loss.register_hook(lambda _: engine.queue_callback(lambda: engine.queue_callback(check)))

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step, unless the gradient that it would follow was left out; then its gradients are gone."""
        found, self.found = self.found, None
        if found is not None:
            optimizer.found_inf = found  # type: ignore[attr-defined]
        try:
            if not self._void:
                optimizer.step()
        finally:
            if found is not None:
                optimizer.found_inf = None  # type: ignore[attr-defined]
        optimizer.zero_grad()
