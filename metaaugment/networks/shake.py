"""Layers whose backward pass is deliberately not the derivative of their forward pass."""

import torch
from torch import Tensor, nn


class ShakeShake(nn.Module):
    """Two branches mixed by random coefficients, others forward than backward (Gastaldi, 2017), one pair a sample.

    Evaluation, and a validation pass of the policy (`at_expectation`), take a half of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_expectation = False

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        if not self.training or self.at_expectation:
            return (first + second) / 2
        shape = (len(first), *[1] * (first.ndim - 1))
        forward, backward = torch.rand(2, *shape, device=first.device, dtype=first.dtype)
        return shaken(first, forward, backward) + shaken(second, 1 - forward, 1 - backward)


def shaken(x: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
    """forward · x, whose derivative is `backward`."""
    return backward * x + (forward - backward) * x.detach()
