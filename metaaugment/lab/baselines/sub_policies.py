"""Sub-policies: what AutoAugment, Fast AutoAugment and DADA find, and how images are augmented by them."""

from dataclasses import dataclass

import torch

from metaaugment.lab.baselines.found import FoundPolicy, Function, Table
from metaaugment.ops import INDEX
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation, device_of


@dataclass(frozen=True)
class SubPolicies(FoundPolicy):
    """Pairs of functions; one pair is drawn for each image."""

    sub_policies: tuple[tuple[Function, Function], ...]

    def __post_init__(self) -> None:
        if not self.sub_policies:
            raise ValueError("its list of sub-policies is empty; there must be at least one")
        for pair in self.sub_policies:
            for function in pair:
                self.check_level(function)


class SubPolicySampler(Sampler):
    """Draws one sub-policy per image, all equally likely, and whether each of its two functions is applied."""

    def __init__(self, policy: SubPolicies) -> None:
        self.table = Table(policy, [function for pair in policy.sub_policies for function in pair])

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device, table = device_of(generator), self.table
        table.to(device)
        sub_policy = torch.randint(0, len(table.functions) // 2, (n, 1), generator=generator, device=device)
        places = 2 * sub_policy + torch.arange(2, device=device)
        chance = torch.rand(n, 2, generator=generator, device=device, dtype=torch.float64)
        functions = torch.where(chance < table.probabilities[places], table.functions[places], INDEX["Identity"])
        return Transformation.draw(functions[:, 0], functions[:, 1], generator, table.magnitudes[places])
