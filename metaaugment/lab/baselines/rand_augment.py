"""RandAugment as it was published (Cubuk et al., 2020): N functions per image, all at one strength M.

The paper's own form, pairs of functions at uniform magnitudes, is `UniformSampler`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metaaugment.distributed import drawn
from metaaugment.embedding import K
from metaaugment.ops import INDEX, Space
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation, apply, device_of


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
