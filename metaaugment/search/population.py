"""A population of networks that train side by side: the worst continue from the best, under changed policies.

Population based training (Jaderberg et al. 2017) as population based augmentation uses it (Ho et al. 2019), on one
machine.
"""

import gc
import itertools
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from torch.optim import Optimizer

from metaaugment.atomic import write_atomically
from metaaugment.baselines.found import Function
from metaaugment.baselines.schedule import Schedule, ScheduleSampler, Stage
from metaaugment.experiments.experiment import Experiment
from metaaugment.learner import Learner
from metaaugment.policy import UniformPolicy
from metaaugment.search import crew
from metaaugment.search.file_lock import FileLock
from metaaugment.search.laboratory import Laboratory, another_tenth
from metaaugment.seeds import EVOLUTION, MEMBER, derived_seed
from metaaugment.training import checkpoint
from metaaugment.training.json_file import read_json, write_json
from metaaugment.training.log import Row
from metaaugment.training.trainer import Trainer

POPULATION = "population.json"
RAY_FOLDER = "ray"  # Tune's own state and checkpoints, if Ray trains
QUANTILE = 0.25  # share of the population that is replaced by better trials
COPIES = 2  # of each function, each with its own probability and level
MAX_TENTHS, MAX_LEVEL = 10, 9
ANEW = 0.2  # probability that a number is drawn anew
PATIENCE = 0.05  # seconds between looks at trials that other processes train
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

    With a trainer for each turn, a network would be built every few epochs and, on a GPU, its step captured again.
    """

    def __init__(self, lab: Laboratory, functions: Functions) -> None:
        self.lab, self.functions = lab, functions
        self._made: tuple[Trainer, LineageSampler] | None = None

    def take(self, number: int, folder: Path, policy: Policy, until: int) -> Trainer:
        """The trainer, with what a trial's folder has of it, or with a new network; to train up to an epoch."""
        if not (folder / checkpoint.LAST).exists():
            fresh = self._make(number, folder)
            fresh[0].save()
            fresh[0].checkpoints.wait()
            self._made = self._made or fresh
        self._made = self._made or self._make(number, folder)
        trainer, sampler = self._made
        trainer.take_up(folder, until)
        sampler.follow(policy)
        return trainer

    def _make(self, number: int, folder: Path) -> tuple[Trainer, LineageSampler]:
        """A trainer with the initial weights of a trial; the recipe of all is the same, so that checkpoints fit."""
        if self.lab.device.type == "cuda":
            gc.collect()  # trainers are reference cycles: the previous one would still hold its memory
        recipe, sampler = self.lab.recipe, LineageSampler(self.functions)
        fresh = self.lab.experiment(seed=derived_seed(recipe.seed, MEMBER, number))

        def learner(experiment: Experiment) -> tuple[Learner, Optimizer | None]:
            return experiment.learner(sampler, UniformPolicy(), space=self.functions.space), None

        return self.lab.trainer(replace(fresh, recipe=recipe), folder, learner), sampler


@dataclass(frozen=True)
class Trial:
    """A network of the population, in a folder of its own.

    Each has its own initial weights, but all share the recipe and the mini-batches, so a checkpoint of one fits all
    others.
    """

    workbench: Workbench
    number: int
    folder: Path

    def advance(self, policy: Policy, epochs: range) -> tuple[float, float]:
        """Train through these epochs, or what is left of them; returns validation accuracy and seconds."""
        started = time.perf_counter()
        if epochs.start > 0:
            _check_begun(self.folder)
        trainer = self.workbench.take(self.number, self.folder, policy, epochs.stop)
        # Spent on these epochs before an interruption.
        before = sum(row["seconds"] for row in trainer.log.rows[epochs.start :]) + trainer.seconds
        trainer.run()
        return trainer.log.rows[-1]["val_accuracy"], before + time.perf_counter() - started

    @property
    def epoch(self) -> int:
        """The epochs that its checkpoint has been trained through."""
        _check_begun(self.folder)
        state = checkpoint.load(self.folder)
        assert state is not None
        return state["epoch"]

    def go_on_from(self, folder: Path) -> None:
        """Replace this trial's network, optimizer and lineage by those of the checkpoint in another folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / checkpoint.BEFORE).unlink(missing_ok=True)
        source = folder / checkpoint.LAST
        write_atomically(self.folder / checkpoint.LAST, lambda part: shutil.copyfile(source, part))


def lineage(folder: Path) -> list[Policy]:
    """The policy of each epoch that a checkpoint was trained through; refuses that of a network that diverged."""
    _check_begun(folder)
    state = checkpoint.load(folder)
    assert state is not None
    if state["log"][-1]["val_loss"] is None:
        raise ValueError(
            f"the network in {folder} diverged, though it is the best: its validation loss is not finite; search in "
            "another folder with a smaller --lr"
        )
    return state["learner"]["sampler"]["lineage"]


def _check_begun(folder: Path) -> None:
    """Refuse to go on without the checkpoint of a trial, which would begin again under its latest policy."""
    if not (folder / checkpoint.LAST).exists():
        raise ValueError(f"{folder} has no {checkpoint.LAST} any more; begin another search with --out")


class Population:
    """Trials that train generation by generation, in any number of processes that share the folder of a search.

    `population.json` has the current generation and its policies. It is written once all copies for that generation are
    made, and trials that were copied do not train on before then: whenever the search stops, its files suffice to
    resume it. What a trial does depends on its checkpoint and its policy alone, and generations wait for all trials, so
    neither the number of processes nor their speed changes what is found.
    """

    def __init__(
        self,
        lab: Laboratory,
        functions: Functions,
        number: int,
        interval: int,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.lab, self.functions, self.look = lab, functions, look
        self.generations = intervals(lab.recipe.epochs, interval)
        workbench = Workbench(lab, functions)
        self.trials = [Trial(workbench, place, lab.folder / f"trial-{place:02d}") for place in range(number)]

    def train(self) -> None:
        """Train trials, beside other processes that do the same, until all are through the last generation."""
        resumed = True
        while True:
            generation, policies = self._state()
            left = list(zip(self.trials, policies, strict=True))
            while left := [work for work in left if not self._passed(*work, generation, resumed)]:
                if self._state()[0] != generation:  # the others are done with it, and train these in the next one
                    break
                self.lab.stop_if_asked()
                time.sleep(PATIENCE)
            if generation + 1 == len(self.generations):
                return
            self._breed(generation)
            resumed = False

    def best(self) -> Trial:
        """The trial with the highest objective in the last generation."""
        return self.trials[ranked(self._objectives(len(self.generations) - 1))[-1]]

    @property
    def finished(self) -> bool:
        known, last = noted(self.lab), len(self.generations) - 1
        return all((trial.number, last) in known for trial in self.trials)

    def _passed(self, trial: Trial, policy: Policy, generation: int, resumed: bool) -> bool:
        """Train a trial through a generation if nobody has yet; returns False if another process is training it.

        Where the search resumes, a trial that is noted is looked at, too: its checkpoint may have been put back to an
        earlier one, and then it makes up for what is missing.
        """
        epochs = self.generations[generation]
        with FileLock(self.lab.folder / f"{trial.folder.name}.lock").attempt() as free:
            if not free:
                return False
            is_noted = (trial.number, generation) in noted(self.lab)
            if not is_noted or (resumed and trial.epoch < epochs.stop):
                self.lab.stop_if_asked()
                objective, seconds = trial.advance(policy, epochs)
                if not is_noted:
                    self.lab.note(row(trial.number, generation, epochs, objective, seconds, policy))
                    self.look()
        return True

    def _breed(self, generation: int) -> None:
        """Make the next generation, unless another process has."""
        with FileLock(self.lab.folder / "population.lock"):
            now, policies = self._state()
            if now != generation:
                return
            random = Random(derived_seed(self.lab.recipe.seed, EVOLUTION, generation))
            for loser, winner in exploit(self._objectives(generation), random).items():
                self.trials[loser].go_on_from(self.trials[winner].folder)
                policies[loser] = explore(policies[winner], random)
            write_json(self.lab.folder / POPULATION, {"generation": generation + 1, "policies": policies})

    def _state(self) -> tuple[int, list[Policy]]:
        """The generation that trains now, and its policies."""
        file = self.lab.folder / POPULATION
        if not file.exists():
            return 0, [self.functions.start() for _ in self.trials]
        state = read_json(file)
        return state["generation"], state["policies"]

    def _objectives(self, generation: int) -> list[float]:
        known = noted(self.lab)
        return [known[trial.number, generation] for trial in self.trials]


def evolve(lab: Laboratory, functions: Functions, number: int, interval: int, processes: int = 1) -> list[Policy]:
    """Train a population to the end, in this process or in several others; returns the lineage of the best trial."""
    look = Progress(lab, number, interval).look
    population = Population(lab, functions, number, interval, look)
    while True:
        if processes == 1:
            population.train()
        else:
            crew.share(lab, min(processes, number), _take_part, (functions, number, interval), look)
        if population.finished:
            return lineage(population.best().folder)


def _take_part(lab: Laboratory, index: int, functions: Functions, number: int, interval: int) -> None:
    Population(lab, functions, number, interval).train()


def noted(lab: Laboratory) -> dict[tuple[int, int], float]:
    """The objectives noted so far, by trial and generation."""
    return {(row["trial"], row["generation"]): row["objective"] for row in lab.trials()}


def row(trial: int, generation: int, epochs: range, objective: float, seconds: float, policy: Policy) -> Row:
    """What is recorded of one interval of a trial."""
    about = {"trial": trial, "generation": generation, "epoch": epochs.stop}
    return about | {"objective": objective, "seconds": seconds, "policy": policy}


class Progress:
    """Prints a line after each tenth of the intervals, from what is noted."""

    def __init__(self, lab: Laboratory, number: int, interval: int) -> None:
        self.lab, self.total = lab, number * len(intervals(lab.recipe.epochs, interval))
        self.told = len(noted(lab))

    def look(self) -> None:
        found = noted(self.lab)
        if another_tenth(self.told, len(found), self.total):
            best = max(found.values())
            self.lab.say(f"{len(found):,} of {self.total:,} intervals; best validation accuracy {best:.2%}")
        self.told = len(found)
