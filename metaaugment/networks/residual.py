"""What the residual networks share: the sequence of blocks, and the initial parameters."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import nn


def three_groups(widths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(inputs, outputs, stride) of the blocks between these widths, for images of 32 pixels.

    They form three groups of equal size, at 32, 16 and 8 pixels: the second and the third begin with a stride of 2.
    """
    group = (len(widths) - 1) // 3
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        yield inputs, outputs, 2 if index in (group, 2 * group) else 1


def initialize(network: nn.Module) -> None:
    """He's normal distribution by fan-out for convolutions, zero for linear biases; the rest stays as torch draws it.

    The published code of all these networks does the same; it all derives from fb.resnet.torch.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
