"""Schedules, which population based augmentation finds: functions that change in the course of training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from metaaugment.lab.baselines.found import FoundPolicy, Function, Table
from metaaugment.ops import INDEX
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation, device_of

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
