"""What the compared systems find, functions with a probability and a level each, and how images are augmented by it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metaaugment.ops import INDEX, MAX_MAGNITUDE, OPS
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation, device_of


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


# -- sub-policies: what AutoAugment, Fast AutoAugment and DADA find ----------------------------------------------------


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


# -- schedules: what population based augmentation finds ---------------------------------------------------------------

# Probabilities that an image gets at most none, one or two functions.
COUNTS = (0.2, 0.3, 0.5)


@dataclass(frozen=True)
class Stage:
    """Functions that are in use for some epochs."""

    epochs: int
    functions: tuple[Function, ...]


@dataclass(frozen=True)
class Schedule(FoundPolicy):
    """A sequence of stages."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError("its schedule has no epochs; there must be at least one")
        numbers = {len(stage.functions) for stage in self.stages}
        if len(numbers) > 1 or min(numbers) < 2:
            raise ValueError(
                f"its stages have {sorted(numbers)} functions; each must have the same number, two or more"
            )
        for stage in self.stages:
            for function in stage.functions:
                self.check_level(function)

    @property
    def epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    def stage(self, epoch: int, epochs: int) -> int:
        """Place of the stage that an epoch is in, with the schedule stretched or shrunk to `epochs` epochs."""
        left = min(epoch, epochs - 1) * self.epochs // epochs
        for place, stage in enumerate(self.stages):
            if left < stage.epochs:
                return place
            left -= stage.epochs
        raise AssertionError("an epoch after the last")


class ScheduleSampler(Sampler):
    """Goes through a stage's functions in random order, until as many are applied as were drawn for the image.

    Each is applied with its own probability. `update` is called once per epoch and advances the schedule.
    """

    def __init__(self, schedule: Schedule, epochs: int) -> None:
        self.schedule, self.epochs, self.epoch = schedule, epochs, 0
        self.table = self._table()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device, table = device_of(generator), self.table
        table.to(device)
        count, order, chance = (
            torch.rand(n, number, generator=generator, device=device, dtype=torch.float64)
            for number in (1, len(table.functions), len(table.functions))
        )
        # Functions that are not applied come last: the first two in the order are those that an image can get.
        order = order.masked_fill(chance >= table.probabilities, 2.0)
        rank, places = order.topk(2, largest=False)
        none, one, _ = COUNTS
        wanted = torch.cat([count >= none, count >= none + one], dim=1)
        functions = torch.where(wanted & (rank < 2), table.functions[places], INDEX["Identity"])
        return Transformation.draw(functions[:, 0], functions[:, 1], generator, table.magnitudes[places])

    def update(self) -> None:
        self.epoch += 1
        self.table.copy_(self._table())

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch = int(state["epoch"])
        self.table.copy_(self._table())

    def _table(self) -> Table:
        """The functions of the current epoch."""
        return Table(self.schedule, self.schedule.stages[self.schedule.stage(self.epoch, self.epochs)].functions)
