"""Small images, networks and learners, as several test files need them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import metaaugment as ma
from metaaugment.lab.data.augment import normalization

SIDE, CLASSES, N = 16, 5, 12
LABELS = torch.arange(N) % CLASSES
MEAN, STD, FILL = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), (125, 100, 80)


def photos(n: int = N, channels: int = 3, side: int = SIDE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=generator)


def prepare(mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Callable[[Tensor], Tensor]:
    return normalization(mean, std, torch.device("cpu"), torch.contiguous_format)


def sharp(policy: ma.PolicyNetwork) -> ma.PolicyNetwork:
    """One whose outputs differ, as a learned one's do."""
    with torch.no_grad():
        policy.output.weight *= 10
    return policy


def trained(
    network: nn.Module | None = None, policy: nn.Module | None = None, channels: int = 3, **options: Any
) -> ma.Learner:
    """A learner after a pass, which gave batch normalisation some statistics, with some p."""
    sampler = ma.TransformationSampler()
    p = torch.rand(14, 14, dtype=torch.float64) ** 3
    sampler.probabilities.copy_(p / p.sum())
    options = {"prepare": prepare(MEAN[:channels], STD[:channels]), "fill": FILL[:channels], **options}
    network = network or ma.network("small-cnn", CLASSES, channels)
    learner = ma.Learner(network, sampler, policy or sharp(ma.PolicyNetwork(128)), **options)
    learner.observe(photos(channels=channels), LABELS)
    return learner
