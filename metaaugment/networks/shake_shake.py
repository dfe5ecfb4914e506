"""Residual networks of two shaken branches (Gastaldi, 2017)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metaaugment.networks.residual import initialize, three_groups
from metaaugment.networks.shake import ShakeShake


class ShakeShakeNet(nn.Module):
    """depth 2×width d, "Shake-Shake-Image": three groups of blocks at 32, 16 and 8 pixels (for images of 32).

    The first group has this width, each of the others twice that of the one before.
    """

    def __init__(self, depth: int, width: int, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth is {depth}; a Shake-Shake network has 6 n + 2 layers: 8, 14, 20, 26, 32, …")
        if width % 2:
            raise ValueError(f"width is {width}; each half of the channels has a skip path, so it must be even")
        widths = [16, *(scale * width for scale in (1, 2, 4) for _ in range((depth - 2) // 6))]
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        self.blocks = nn.Sequential(*(Block(*shape) for shape in three_groups(widths)))
        self.output = nn.Linear(widths[-1], num_classes)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.stem(images)))
        return self.output(F.relu(x).mean((2, 3)))


class Block(nn.Module):
    """Two branches of ReLU, 3×3 convolution, BN, twice, mixed at random; the skip is the input if widths agree."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = branch(inputs, outputs, stride)
        self.second = branch(inputs, outputs, stride)
        self.shake = ShakeShake()
        self.skip = None if inputs == outputs else Skip(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        # Branches and skip path all begin with the same ReLU.
        active = F.relu(x)
        skip = x if self.skip is None else self.skip(active)
        return skip + self.shake(self.first(active), self.second(active))


def branch(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Skip(nn.Module):
    """Each half of the outputs has its own 1×1 convolution, the second over the input moved right and down by a pixel.

    At a stride of 2 the halves thus see different pixels.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs // 2, 1, stride, bias=False)
        self.conv2 = nn.Conv2d(inputs, outputs // 2, 1, stride, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        moved = F.pad(x, (1, -1, 1, -1))
        return self.norm(torch.cat((self.conv1(x), self.conv2(moved)), dim=1))
