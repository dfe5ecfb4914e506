"""RandAugment (Cubuk et al., 2020) and TrivialAugment (Müller and Hutter, 2021) as they were published.

RandAugment's N functions per image all have one strength M. The paper's own form of it, pairs of functions at uniform
magnitudes, is `UniformSampler`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metaaugment.distributed import drawn
from metaaugment.embedding import K
from metaaugment.ops import INDEX, MAX_MAGNITUDE, Space
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation, apply, device_of

STRENGTHS = 31  # of TrivialAugment


class RandAugmentSampler(Sampler):
    """One or two of the 14 functions, drawn with replacement, at one magnitude."""

    def __init__(self, magnitude: float, functions: int = 2) -> None:
        self.magnitude, self.functions = magnitude, functions

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device = device_of(generator)
        first, second = torch.randint(0, K, (2, n), generator=generator, device=device)
        if self.functions == 1:
            second = torch.full_like(second, INDEX["Identity"])
        magnitudes = torch.full((n, 2), self.magnitude, device=device, dtype=torch.float64)
        return Transformation.draw(first, second, generator, magnitudes)


def further(
    magnitude: float, functions: int, space: str | Space, fill: Sequence[int], generator: torch.Generator
) -> list[Callable[[Tensor], Tensor]]:
    """Augmentations to apply before the transformation, so that an image gets more functions than the two of that."""
    samplers = [RandAugmentSampler(magnitude, min(2, functions - done)) for done in range(0, functions, 2)]

    def applied(sampler: RandAugmentSampler) -> Callable[[Tensor], Tensor]:
        return lambda images: apply(images, drawn(lambda n: sampler.sample(n, generator), len(images)), space, fill)

    return [applied(sampler) for sampler in samplers]


class TrivialAugmentSampler(Sampler):
    """One function per image at a strength of 0 to 30, both uniform.

    The 14 functions are the paper's; the second function of each pair is Identity.
    """

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device = device_of(generator)
        first = torch.randint(0, K, (n,), generator=generator, device=device)
        strength = torch.randint(0, STRENGTHS, (n, 2), generator=generator, device=device)
        magnitudes = strength.double() * MAX_MAGNITUDE / (STRENGTHS - 1)
        # Thirds are rounded up: rounded down, an argument would be truncated to the next lower integer (Rotate at 26).
        magnitudes = torch.where(strength % 3 == 0, magnitudes, magnitudes.nextafter(torch.full_like(magnitudes, 11)))
        return Transformation.draw(first, torch.full_like(first, INDEX["Identity"]), generator, magnitudes)
