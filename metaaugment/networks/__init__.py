"""Task networks, from images to logits, by name."""

from collections.abc import Callable

from torch import nn

from metaaugment.networks.pyramidnet import PyramidNet
from metaaugment.networks.resnet import ResNet
from metaaugment.networks.shake_shake import ShakeShakeNet
from metaaugment.networks.small import SmallCNN
from metaaugment.networks.wide_resnet import WideResNet

NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {
    "pyramidnet-272-a200": lambda classes, channels: PyramidNet(272, 200, classes, channels),
    "resnet-50": lambda classes, channels: ResNet((3, 4, 6, 3), classes, channels),
    "resnet-200": lambda classes, channels: ResNet((3, 24, 36, 3), classes, channels, pre_activation=True),
    "shake-shake-26-2x96d": lambda classes, channels: ShakeShakeNet(26, 96, classes, channels),
    "shake-shake-26-2x112d": lambda classes, channels: ShakeShakeNet(26, 112, classes, channels),
    "small-cnn": lambda classes, channels: SmallCNN(classes, channels),
    "wrn-40-2": lambda classes, channels: WideResNet(40, 2, classes, channels),
    "wrn-28-10": lambda classes, channels: WideResNet(28, 10, classes, channels),
}


def network(name: str, num_classes: int, channels: int = 3) -> nn.Module:
    """A network by its name, with fresh parameters."""
    if name not in NETWORKS:
        raise ValueError(f"unknown network {name!r}; choose one of {', '.join(sorted(NETWORKS))}")
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; a classifier has at least 2")
    return NETWORKS[name](num_classes, channels)


__all__ = ["NETWORKS", "PyramidNet", "ResNet", "ShakeShakeNet", "SmallCNN", "WideResNet", "network"]
