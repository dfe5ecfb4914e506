"""Wide residual networks (Zagoruyko and Komodakis, 2016): pre-activation blocks, widened."""

import torch.nn.functional as F
from torch import Tensor, nn

from metaaugment.networks.residual import initialize, three_groups


class WideResNet(nn.Module):
    """WRN-depth-width: three groups of blocks at 32, 16 and 8 pixels (for images of 32), then mean and linear layer."""

    def __init__(self, depth: int, width: int, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth is {depth}; a wide residual network has 6 n + 4 layers: 10, 16, 22, 28, 34, 40, …")
        widths = [16, *(scale * width for scale in (16, 32, 64) for _ in range((depth - 4) // 6))]
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*(Block(*shape) for shape in three_groups(widths)))
        self.norm = nn.BatchNorm2d(widths[-1])
        self.output = nn.Linear(widths[-1], num_classes)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))
        return self.output(F.relu(self.norm(x)).mean((2, 3)))


class Block(nn.Module):
    """BN, ReLU, 3×3 convolution, twice; the shortcut is the input, or a 1×1 convolution of it where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return self.conv2(F.relu(self.norm2(self.conv1(active)))) + shortcut
