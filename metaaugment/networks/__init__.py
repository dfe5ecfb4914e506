"""Task networks, from images to logits, by name."""

from collections.abc import Callable

from torch import nn

from metaaugment.networks.small import SmallCNN
from metaaugment.networks.wide_resnet import WideResNet

NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {
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


__all__ = ["NETWORKS", "SmallCNN", "WideResNet", "network"]
