"""What the compared systems find: functions with a probability and a level each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from metaaugment.ops import INDEX, MAX_MAGNITUDE, OPS


@dataclass(frozen=True)
class Function:
    """An image function of a policy, with its probability and its level on the scale of its system."""

    name: str
    probability: float
    level: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in INDEX:
            raise ValueError(f"unknown function {self.name!r}; choose one of {', '.join(INDEX)}")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"{self.name} has the probability {self.probability:g}; it must lie in [0, 1]")

    @property
    def takes_level(self) -> bool:
        return OPS[INDEX[self.name]].magnitude


@dataclass(frozen=True)
class FoundPolicy:
    """A policy of a compared system. Levels range from 0 to `max_level`, magnitudes of its space from 0 to 10."""

    system: str
    source: str
    space: str
    max_level: float

    def magnitude(self, function: Function) -> float:
        return MAX_MAGNITUDE * function.level / self.max_level

    def check_level(self, function: Function) -> None:
        if not 0 <= function.level <= self.max_level:
            raise ValueError(f"{function.name} has the level {function.level:g}; it must be 0 to {self.max_level:g}")


class Table:
    """Indices, probabilities and magnitudes of functions, on the device where they are drawn.

    Magnitudes are float64: a level that its system truncates, such as 10 · 0.29, must not fall short by rounding.
    """

    def __init__(self, policy: FoundPolicy, functions: Sequence[Function]) -> None:
        self.functions = torch.tensor([INDEX[function.name] for function in functions])
        self.probabilities = torch.tensor([function.probability for function in functions], dtype=torch.float64)
        self.magnitudes = torch.tensor([policy.magnitude(function) for function in functions], dtype=torch.float64)

    def to(self, device: torch.device) -> None:
        """Move once: a captured step cannot copy from the host."""
        if self.functions.device != device:
            for name, value in vars(self).items():
                setattr(self, name, value.to(device))

    def copy_(self, other: "Table") -> None:
        """Copy into the memory in use, which a captured step reads."""
        for name, value in vars(self).items():
            value.copy_(getattr(other, name))
