"""TrivialAugment (Müller and Hutter, 2021): one function per image at a strength of 0 to 30, both uniform."""

import torch

from metaaugment.embedding import K
from metaaugment.ops import INDEX, MAX_MAGNITUDE
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation, device_of

STRENGTHS = 31


class TrivialAugmentSampler(Sampler):
    """Its 14 functions are the paper's; the second function of each pair is Identity."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device = device_of(generator)
        first = torch.randint(0, K, (n,), generator=generator, device=device)
        strength = torch.randint(0, STRENGTHS, (n, 2), generator=generator, device=device)
        magnitudes = strength.double() * MAX_MAGNITUDE / (STRENGTHS - 1)
        # Thirds are rounded up: rounded down, an argument would be truncated to the next lower integer (Rotate at 26).
        magnitudes = torch.where(strength % 3 == 0, magnitudes, magnitudes.nextafter(torch.full_like(magnitudes, 11)))
        return Transformation.draw(first, torch.full_like(first, INDEX["Identity"]), generator, magnitudes)
