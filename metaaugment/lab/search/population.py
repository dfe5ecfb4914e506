"""A population of networks that train side by side: the worst continue from the best, under changed policies.

Population based training (Jaderberg et al. 2017) as population based augmentation uses it (Ho et al. 2019).
"""

from random import Random

from metaaugment.lab.search.crew import Alone, Crew
from metaaugment.lab.search.evolution import Functions, Policy, exploit, explore, intervals, ranked
from metaaugment.lab.search.trials import Laboratory, another_tenth
from metaaugment.lab.search.workbench import Interval, epochs_of, folder_of, go_on_from, lineage
from metaaugment.lab.seeds import EVOLUTION, derived_seed
from metaaugment.lab.training.json_file import read_json, write_json
from metaaugment.lab.training.log import Row

POPULATION = "population.json"


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
