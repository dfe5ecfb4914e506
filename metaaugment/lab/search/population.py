"""A population of networks that train side by side: the worst continue from the best, under changed policies.

Population based training (Jaderberg et al. 2017) as population based augmentation uses it (Ho et al. 2019), on one
machine.
"""

import time
from collections.abc import Callable
from random import Random

from metaaugment.files.lock import FileLock
from metaaugment.lab.search import crew
from metaaugment.lab.search.evolution import Functions, Policy, exploit, explore, intervals, ranked
from metaaugment.lab.search.laboratory import Laboratory, another_tenth
from metaaugment.lab.search.workbench import Trial, Workbench, lineage
from metaaugment.lab.seeds import EVOLUTION, derived_seed
from metaaugment.lab.training.json_file import read_json, write_json
from metaaugment.lab.training.log import Row

POPULATION = "population.json"
RAY_FOLDER = "ray"  # Tune's own state and checkpoints, if Ray trains
PATIENCE = 0.05  # seconds between looks at trials that other processes train


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
