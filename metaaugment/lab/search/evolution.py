"""The policies of a population, and how they change: explore, and exploit the better ones."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from metaaugment.lab.baselines.found import Function, Schedule, Stage

QUANTILE = 0.25  # share of the population that is replaced by better trials
COPIES = 2  # of each function, each with its own probability and level
MAX_TENTHS, MAX_LEVEL = 10, 9
ANEW = 0.2  # probability that a number is drawn anew
SCALE = 10  # the level of full strength, which a policy does not reach: its levels end at 9

# For each function in turn, its probability in tenths and its level.
Policy = list[int]


@dataclass(frozen=True)
class Functions:
    """The functions that policies consist of, and the space of their levels. `source`: where schedules come from."""

    names: tuple[str, ...]
    space: str
    source: str

    def start(self) -> Policy:
        """The first policy, which applies nothing."""
        return [0, 0] * len(self.names) * COPIES

    def schedule(self, lineage: Sequence[Policy]) -> Schedule:
        """The schedule that a network was trained under, given the policy of each epoch."""
        stages = tuple(Stage(len(list(same)), self._stage(policy)) for policy, same in itertools.groupby(lineage))
        return Schedule("pba", self.source, self.space, SCALE, stages)

    def _stage(self, policy: Policy) -> tuple[Function, ...]:
        numbers = zip(self.names * COPIES, policy[::2], policy[1::2], strict=True)
        return tuple(Function(name, tenths / 10, level) for name, tenths, level in numbers)


def explore(policy: Policy, random: Random) -> Policy:
    """Each number drawn anew, or moved by up to three either way, as population based augmentation does."""
    return [_changed(number, most, random) for number, most in zip(policy, itertools.cycle((MAX_TENTHS, MAX_LEVEL)))]


def _changed(number: int, most: int, random: Random) -> int:
    if random.random() < ANEW:
        return random.randint(0, most)
    return min(most, max(0, number + random.choice((-1, 1)) * random.randint(0, 3)))


def exploit(objectives: Sequence[float], random: Random) -> dict[int, int]:
    """For each trial of the worst quarter, a random trial of the best quarter that it continues from."""
    order = ranked(objectives)
    number = min(math.ceil(QUANTILE * len(order)), len(order) // 2)
    return {loser: random.choice(order[-number:]) for loser in order[:number]}


def ranked(objectives: Sequence[float]) -> list[int]:
    """Trials from the worst to the best; of equal ones the later ranks higher, so that the order is deterministic."""
    return sorted(range(len(objectives)), key=lambda trial: objectives[trial])


def intervals(epochs: int, interval: int) -> list[range]:
    """The epochs of each generation; the last one may have fewer."""
    return [range(first, min(first + interval, epochs)) for first in range(0, epochs, interval)]
