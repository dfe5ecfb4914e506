"""Residual networks of bottleneck blocks, for images of 224 pixels (He et al., 2016).

ResNet-50 of "Deep residual learning" has its activations after the convolutions, ResNet-200 of "Identity mappings"
before them. A block's stride is in its 3×3 convolution, not in the 1×1 before it as in the first paper: this follows
fb.resnet.torch, which the authors of the second paper point to, and torchvision ("v1.5"). Names are torchvision's: its
weights of ResNet-50 load as they are.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from metaaugment.networks.residual import initialize


class ResNet(nn.Module):
    """Four stages of blocks at 56, 28, 14 and 7 pixels (for images of 224), then the mean and a linear layer.

    Args:
        blocks: how many there are in each stage; a block has three layers, so (3, 4, 6, 3) has a depth of 50.
        num_classes, channels: of the logits, and of the images.
        width: of the stem, and of the 3×3 convolutions of the first stage; it doubles with each further stage.
        pre_activation: whether batch normalisation and ReLU come before a block's convolutions.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        num_classes: int,
        channels: int = 3,
        width: int = 64,
        pre_activation: bool = False,
    ) -> None:
        super().__init__()
        block = PreActivation if pre_activation else Bottleneck
        self.conv1 = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = stage(block, width, width, blocks[0], stride=1)
        self.layer2 = stage(block, 4 * width, 2 * width, blocks[1])
        self.layer3 = stage(block, 8 * width, 4 * width, blocks[2])
        self.layer4 = stage(block, 16 * width, 8 * width, blocks[3])
        # Pre-activation blocks leave the last sum without an activation.
        self.last = nn.Sequential(nn.BatchNorm2d(32 * width), nn.ReLU()) if pre_activation else nn.Identity()
        self.fc = nn.Linear(32 * width, num_classes)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.last(x).mean((2, 3)))


class Bottleneck(nn.Module):
    """Convolutions 1×1, 3×3, 1×1, each with BN; ReLU after the first two and the sum; outputs are four times inner."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.conv1, self.conv2, self.conv3 = convolutions(inputs, inner, stride)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(inner), nn.BatchNorm2d(inner), nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn3(self.conv3(y)) + shortcut)


class PreActivation(nn.Module):
    """The same convolutions with BN and ReLU before each; a shortcut with a convolution shares the first of these."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.conv1, self.conv2, self.conv3 = convolutions(inputs, inner, stride)
        # Only the very first block widens without a stride, and its input, from the stem, is activated already.
        activated = inputs != outputs and stride == 1
        self.bn1 = nn.Identity() if activated else nn.BatchNorm2d(inputs)
        self.bn2, self.bn3 = nn.BatchNorm2d(inner), nn.BatchNorm2d(inner)
        self.downsample = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        y = self.conv2(F.relu(self.bn2(self.conv1(active))))
        shortcut = x if self.downsample is None else self.downsample(active)
        return self.conv3(F.relu(self.bn3(y))) + shortcut


def convolutions(inputs: int, inner: int, stride: int) -> tuple[nn.Conv2d, nn.Conv2d, nn.Conv2d]:
    return (
        nn.Conv2d(inputs, inner, 1, bias=False),
        nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
        nn.Conv2d(inner, 4 * inner, 1, bias=False),
    )


def stage(
    block: type[Bottleneck | PreActivation], inputs: int, inner: int, count: int, stride: int = 2
) -> nn.Sequential:
    return nn.Sequential(block(inputs, inner, stride), *(block(4 * inner, inner, 1) for _ in range(count - 1)))
