"""Pyramidal residual networks (Han et al., 2017) with ShakeDrop (Yamada et al., 2018)."""

import torch.nn.functional as F
from torch import Tensor, nn

from metaaugment.networks.residual import initialize, three_groups
from metaaugment.networks.shake import ShakeDrop


class PyramidNet(nn.Module):
    """PyramidNet-depth (bottleneck, additive): each block is wider than the last by the same amount, alpha in total.

    The probability of keeping a block's branch falls linearly with its place, to a half at the last block.
    """

    def __init__(self, depth: int, alpha: int, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        if depth < 11 or (depth - 2) % 9:
            raise ValueError(f"depth is {depth}; a pyramidal network has 9 n + 2 layers: 11, 20, …, 164, 200, 236, 272")
        count = (depth - 2) // 3
        # Rounded once, as in the authors' code; their formula, truncated at each block, would not reach 16 + alpha.
        widths = [16, *(4 * int(16.5 + alpha * place / count) for place in range(1, count + 1))]
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        self.blocks = nn.Sequential(
            *(Block(*shape, p=1 - 0.5 * place / count) for place, shape in enumerate(three_groups(widths), start=1))
        )
        self.norm = nn.BatchNorm2d(widths[-1])
        self.output = nn.Linear(widths[-1], num_classes)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem_norm(self.stem(images)))
        return self.output(F.relu(self.norm(x)).mean((2, 3)))


class Block(nn.Module):
    """BN, then convolutions 1×1, 3×3, 1×1 with BN after each and ReLU between them; `shortcut` has no parameters.

    The 1×1 convolutions lead to a quarter of the outputs' width and back.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, p: float) -> None:
        super().__init__()
        self.outputs, self.stride = outputs, stride
        inner = outputs // 4
        self.branch = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            ShakeDrop(p),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x) + shortcut(x, self.outputs, self.stride)


def shortcut(x: Tensor, outputs: int, stride: int) -> Tensor:
    """The input, averaged over stride × stride pixels, with channels of zeros for those it lacks."""
    # At an odd size the last window holds fewer pixels, as the convolution's last step does.
    pooled = x if stride == 1 else F.avg_pool2d(x, stride, ceil_mode=True)
    return F.pad(pooled, (0, 0, 0, 0, 0, outputs - x.shape[1]))
