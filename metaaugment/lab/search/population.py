"""A population of networks that train side by side: the worst continue from the best, under changed policies.

Population based training (Jaderberg et al. 2017) as population based augmentation uses it (Ho et al. 2019).
"""

import gc
import itertools
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from torch.optim import Optimizer

from metaaugment.files.atomic import write_atomically
from metaaugment.files.lock import FileLock
from metaaugment.lab.baselines.found import Function, Schedule, ScheduleSampler, Stage
from metaaugment.lab.experiments.experiment import Experiment
from metaaugment.lab.search.crew import Alone, Crew
from metaaugment.lab.search.trials import Laboratory, another_tenth
from metaaugment.lab.seeds import EVOLUTION, MEMBER, derived_seed
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training.json_file import read_json, write_json
from metaaugment.lab.training.log import Row
from metaaugment.lab.training.trainer import Trainer
from metaaugment.learner import Learner
from metaaugment.policy import UniformPolicy

POPULATION = "population.json"
QUANTILE = 0.25  # share of the population that is replaced by better trials
COPIES = 2  # of each function, each with its own probability and level
MAX_TENTHS, MAX_LEVEL = 10, 9
ANEW = 0.2  # probability that a number is drawn anew
SCALE = 10  # the level of full strength, which a policy does not reach: its levels end at 9

# For each function in turn, its probability in tenths and its level.
Policy = list[int]


# -- policies, and how they change: explore, and exploit the better ones -----------------------------------------------


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


# -- where the networks are trained ------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A piece of work: the epochs that a trial is trained through under a policy."""

    trial: int
    policy: Policy
    epochs: range


class LineageSampler(ScheduleSampler):
    """Augments by one policy, and keeps the policies of all epochs before.

    They are part of its state, and so of the network's checkpoint: every trial that continues from it inherits them.
    """

    def __init__(self, functions: Functions) -> None:
        self.functions, self.policy, self.lineage = functions, functions.start(), []
        super().__init__(functions.schedule([self.policy]), epochs=1)

    def follow(self, policy: Policy) -> None:
        """Augment by another policy, in the memory that a captured step uses."""
        self.policy, self.schedule = policy, self.functions.schedule([policy])
        self.table.copy_(self._table())

    def update(self) -> None:
        super().update()
        self.lineage = [*self.lineage, self.policy]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"lineage": self.lineage}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.lineage = state["lineage"]


class Workbench:
    """The one trainer that the trials of a process take turns on, each from the checkpoint in its folder.

    With a trainer for each turn, a network would be built every few epochs and, on a GPU, its step captured again. Each
    trial has its own initial weights, but all share the recipe and the mini-batches, so a checkpoint of one fits all
    others.
    """

    def __init__(self, lab: Laboratory, functions: Functions) -> None:
        self.lab, self.functions = lab, functions
        self._made: tuple[Trainer, LineageSampler] | None = None

    def __call__(self, interval: Interval) -> tuple[float, float]:
        """Train through an interval, or what is left of it; returns validation accuracy and seconds."""
        started, epochs, folder = time.perf_counter(), interval.epochs, folder_of(self.lab, interval.trial)
        # A process that was given up for dead may still be training there.
        with FileLock(self.lab.folder / f"{folder.name}.lock"):
            if epochs.start > 0:
                _check_begun(folder)
            trainer = self._take(folder, interval)
            # Spent on these epochs before an interruption.
            before = sum(row["seconds"] for row in trainer.log.rows[epochs.start :]) + trainer.seconds
            trainer.run()
        return trainer.log.rows[-1]["val_accuracy"], before + time.perf_counter() - started

    def _take(self, folder: Path, interval: Interval) -> Trainer:
        """The trainer, with what a trial's folder has of it, or with a new network."""
        fresh = None if (folder / checkpoint.LAST).exists() else self._begin(folder, interval.trial)
        self._made = self._made or fresh or self._make(folder, interval.trial)
        trainer, sampler = self._made
        trainer.take_up(folder, interval.epochs.stop)
        sampler.follow(interval.policy)
        return trainer

    def _begin(self, folder: Path, trial: int) -> tuple[Trainer, LineageSampler]:
        """Make a trainer, and save its network as the first checkpoint of the trial."""
        trainer, sampler = self._make(folder, trial)
        trainer.save()
        trainer.checkpoints.wait()
        return trainer, sampler

    def _make(self, folder: Path, trial: int) -> tuple[Trainer, LineageSampler]:
        """A trainer with the initial weights of a trial; the recipe of all is the same, so that checkpoints fit."""
        if self.lab.device.type == "cuda":
            gc.collect()  # trainers are reference cycles: the previous one would still hold its memory
        recipe, sampler = self.lab.recipe, LineageSampler(self.functions)
        fresh = self.lab.experiment(seed=derived_seed(recipe.seed, MEMBER, trial))

        def learner(experiment: Experiment) -> tuple[Learner, Optimizer | None]:
            return experiment.learner(sampler, UniformPolicy(), space=self.functions.space), None

        return self.lab.trainer(replace(fresh, recipe=recipe), folder, learner), sampler


def folder_of(lab: Laboratory, trial: int) -> Path:
    return lab.folder / f"trial-{trial:02d}"


def go_on_from(folder: Path, better: Path) -> None:
    """Replace a trial's network, optimizer and lineage by those of the checkpoint in another folder."""
    (folder / checkpoint.BEFORE).unlink(missing_ok=True)
    write_atomically(folder / checkpoint.LAST, lambda part: shutil.copyfile(better / checkpoint.LAST, part))


def epochs_of(folder: Path) -> int:
    """The epochs that a trial's checkpoint has been trained through."""
    return _state(folder)["epoch"]


def lineage(folder: Path) -> list[Policy]:
    """The policy of each epoch that a checkpoint was trained through; refuses that of a network that diverged."""
    state = _state(folder)
    if state["log"][-1]["val_loss"] is None:
        raise ValueError(
            f"the network in {folder} diverged, though it is the best: its validation loss is not finite; search in "
            "another folder with a smaller --lr"
        )
    return state["learner"]["sampler"]["lineage"]


def _state(folder: Path) -> dict[str, Any]:
    _check_begun(folder)
    state = checkpoint.load(folder)
    assert state is not None
    return state


def _check_begun(folder: Path) -> None:
    """Refuse to go on without the checkpoint of a trial, which would begin again under its latest policy."""
    if not (folder / checkpoint.LAST).exists():
        raise ValueError(f"{folder} has no {checkpoint.LAST} any more; begin another search with --out")


# -- generation by generation ------------------------------------------------------------------------------------------


class Population:
    """Trials that are trained generation by generation, by whatever crew does the intervals.

    `population.json` has the current generation and its policies. It is written once all copies for that generation are
    made, and trials that were copied do not train on before then: whenever the search stops, its files suffice to
    resume it. What a trial does depends on its checkpoint and its policy alone, and generations wait for all trials, so
    neither the number of processes nor their speed changes what is found.
    """

    def __init__(self, lab: Laboratory, functions: Functions, number: int, interval: int) -> None:
        self.lab, self.functions, self.number = lab, functions, number
        self.generations = intervals(lab.recipe.epochs, interval)

    def evolve(self, crew: Alone | Crew) -> list[Policy]:
        """Train to the end; returns the lineage of the trial with the highest objective in the last generation."""
        generation, policies = self._state()
        self._train(crew, generation, policies, resumed=True)
        while generation + 1 < len(self.generations):
            policies = self._breed(generation, policies)
            generation += 1
            self._train(crew, generation, policies, resumed=False)
        return lineage(folder_of(self.lab, ranked(self._objectives(generation))[-1]))

    def _train(self, crew: Alone | Crew, generation: int, policies: list[Policy], resumed: bool) -> None:
        """Train all trials through a generation that are not noted yet.

        Where the search resumes, a trial that is noted is looked at, too: its checkpoint may have been put back to an
        earlier one, and then it makes up for what is missing.
        """
        epochs, known = self.generations[generation], self._noted()
        left = [
            Interval(trial, policy, epochs)
            for trial, policy in enumerate(policies)
            if (trial, generation) not in known or (resumed and epochs_of(folder_of(self.lab, trial)) < epochs.stop)
        ]
        for interval, (objective, seconds) in crew.do(left):
            if (interval.trial, generation) not in known:
                self._note(interval, generation, objective, seconds)

    def _note(self, interval: Interval, generation: int, objective: float, seconds: float) -> None:
        """Record an interval of a trial, and say how far the search is after each tenth of them."""
        about = {"trial": interval.trial, "generation": generation, "epoch": interval.epochs.stop}
        row: Row = about | {"objective": objective, "seconds": seconds, "policy": interval.policy}
        self.lab.note(row)
        found, total = self._noted(), self.number * len(self.generations)
        if another_tenth(len(found) - 1, len(found), total):
            best = max(found.values())
            self.lab.say(f"{len(found):,} of {total:,} intervals; best validation accuracy {best:.2%}")

    def _breed(self, generation: int, policies: list[Policy]) -> list[Policy]:
        """Make the next generation; returns its policies."""
        random = Random(derived_seed(self.lab.recipe.seed, EVOLUTION, generation))
        policies = list(policies)
        for loser, winner in exploit(self._objectives(generation), random).items():
            go_on_from(folder_of(self.lab, loser), folder_of(self.lab, winner))
            policies[loser] = explore(policies[winner], random)
        write_json(self.lab.folder / POPULATION, {"generation": generation + 1, "policies": policies})
        return policies

    def _state(self) -> tuple[int, list[Policy]]:
        """The generation that trains now, and its policies."""
        file = self.lab.folder / POPULATION
        if not file.exists():
            return 0, [self.functions.start() for _ in range(self.number)]
        state = read_json(file)
        return state["generation"], state["policies"]

    def _objectives(self, generation: int) -> list[float]:
        known = self._noted()
        return [known[trial, generation] for trial in range(self.number)]

    def _noted(self) -> dict[tuple[int, int], float]:
        """The objectives noted so far, by trial and generation."""
        return {(row["trial"], row["generation"]): row["objective"] for row in self.lab.trials()}
