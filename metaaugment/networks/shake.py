"""Layers whose backward pass is deliberately not the derivative of their forward pass.

Their draws come from torch's generator of the input's device and stay on it, so a pass can be captured in a CUDA graph
and repeated (`replay.py`). They are made for the global mini-batch.
"""

import torch
from torch import Tensor, nn

from metaaugment.distributed import drawn


class Shaking(nn.Module):
    """A layer that shakes in training; `at_expectation` asks it not to, in the policy's validation pass."""

    def __init__(self) -> None:
        super().__init__()
        self.at_expectation = False

    @property
    def still(self) -> bool:
        return self.at_expectation or not self.training


class ShakeShake(Shaking):
    """Two branches mixed by random coefficients per sample, different ones forward and backward (Gastaldi, 2017).

    When still, it takes a half of each branch, the expectation of both coefficients.
    """

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        if self.still:
            return (first + second) / 2
        forward, backward = two_a_sample(first)
        return shaken(first, forward, backward) + shaken(second, 1 - forward, 1 - backward)


class ShakeDrop(Shaking):
    """One branch that is kept with probability p, and otherwise shaken (Yamada et al., 2018).

    Forward it is multiplied by b + α − bα, backward by b + β − bβ, with α from [−1, 1] and β from [0, 1]. The gate b is
    drawn once per mini-batch, as in the authors' code; α and β once per sample, as in AutoAugment's. The authors draw
    these once per element, which makes a step of PyramidNet-272 take 1.7 times as long.

    When still, the branch is multiplied by p, the expectation of the forward coefficient. That of the backward one is
    (1 + p) / 2, but the gradient computed with it would not be that of the network's loss.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.still:
            return self.p * x
        # In float32, since in a smaller type p may round to 1.
        b = (torch.rand((), device=x.device, dtype=torch.float32) < self.p).to(x.dtype)
        alpha, beta = two_a_sample(x)
        alpha = 2 * alpha - 1
        return shaken(x, b + (1 - b) * alpha, b + (1 - b) * beta)

    def extra_repr(self) -> str:
        return f"p={self.p:.3f}"


def shaken(x: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
    """forward · x, whose derivative is `backward`."""
    return backward * x + (forward - backward) * x.detach()


def two_a_sample(x: Tensor) -> Tensor:
    """Two uniform numbers for each sample of x, [2, n, 1, …]."""

    def draw(n: int) -> Tensor:
        return torch.rand(2, n, *[1] * (x.ndim - 1), device=x.device, dtype=x.dtype).transpose(0, 1)

    return drawn(draw, len(x)).transpose(0, 1)
