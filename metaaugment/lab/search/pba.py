"""The search of population based augmentation (Ho et al. 2019): a schedule, found with one population of networks."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from metaaugment.lab.baselines.found import Schedule
from metaaugment.lab.data import DATASETS
from metaaugment.lab.experiments.flags import one_of, refuse
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search.crew import Alone, Crew
from metaaugment.lab.search.population import POPULATION, Functions, Population, Workbench, intervals
from metaaugment.lab.search.trials import Laboratory, understood
from metaaugment.lab.training.json_file import read_json
from metaaugment.lab.training.log import Row
from metaaugment.lab.words import number_of
from metaaugment.ops import PAPER_OPS

# In PBA's own order, as in the schedules that its authors released.
PBA_FUNCTIONS = (
    "Rotate", "TranslateX", "TranslateY", "Brightness", "Color", "Invert", "Sharpness", "Posterize", "ShearX",
    "Solarize", "ShearY", "Equalize", "AutoContrast", "Cutout", "Contrast",
)  # fmt: skip
PAPER_FUNCTIONS = tuple(op.name for op in PAPER_OPS)

ROW = {"trial": int, "generation": int, "objective": float, "policy": list}  # what all rows have


@dataclass(frozen=True)
class Settings:
    """Population based augmentation: networks train side by side, and the worst continue from the best.

    All start without augmentation. After each interval, every network of the worst quarter is replaced by a copy of one
    of the best quarter and takes over its policy, which is then randomly changed. The schedule found is the sequence of
    policies that the best network was trained under.
    """

    trials: int = 16
    """Networks in the population."""
    interval: int = 3
    """Epochs between changes of the population."""
    functions: Literal["paper", "pba"] = "paper"
    """Functions to use: the paper's 14 in the recipe's space, or PBA's own 15 in AutoAugment's."""
    processes: int = 1
    """Processes of this machine that share the trials, spread over the GPUs; what is found is the same with any
    number of them."""
    ray_workers: int | None = None
    """Train this many trials at a time, with Ray, each with the given --threads or 1; what is found is the same."""
    address: str | None = None
    """Address of a Ray cluster, such as HOST:6379; all of its machines need access to the folder of the search."""

    def check(self) -> None:
        refuse("trials", self.trials, self.trials >= 2, "a whole number of at least 2")
        refuse("interval", self.interval, self.interval >= 1, "a whole number of at least 1")
        one_of(self.functions, ("paper", "pba"), "--functions")
        refuse("processes", self.processes, self.processes >= 1, "a whole number of at least 1")
        many = self.ray_workers is None or self.ray_workers >= 1
        refuse("ray_workers", self.ray_workers, many, "a whole number of at least 1")
        if self.processes > 1 and self.by_ray:
            raise ValueError(f"--processes is {self.processes}, but Ray starts its own; leave out one of the two")

    @property
    def by_ray(self) -> bool:
        return self.ray_workers is not None or self.address is not None


def find(lab: Laboratory, settings: Settings) -> Schedule:
    """Search to the end; the schedule has as many epochs as a trial."""
    epochs = lab.recipe.epochs
    if settings.interval >= epochs:
        raise ValueError(
            f"--interval is {settings.interval}, but a trial has {number_of('epoch', epochs)}, so that no policy "
            "would ever change; choose a smaller one, or more --epochs"
        )
    functions, file = _functions(settings, lab.recipe), lab.folder / POPULATION
    if file.exists():
        with understood(file):
            generations = len(intervals(epochs, settings.interval))
            _check(read_json(file), functions, settings.trials, generations)
    elif any(row["generation"] > 0 for row in lab.trials()):
        raise ValueError(f"{file} is missing; restore it, or begin another search with --out")
    with _crew(lab, settings, functions) as crew:
        lineage = Population(lab, functions, settings.trials, settings.interval).evolve(crew)
    return functions.schedule(lineage)


def _crew(lab: Laboratory, settings: Settings, functions: Functions) -> AbstractContextManager[Alone | Crew]:
    """What trains the trials: this process, several others, or Ray."""
    if settings.by_ray:
        try:
            from metaaugment.lab.search.ray_crew import RayCrew
        except ImportError:
            flag = "--ray-workers" if settings.address is None else "--address"
            way = "install it with: pip install 'metaaugment[search]'"
            raise ValueError(f"{flag} needs the package ray; {way}") from None
        return RayCrew(lab, settings.trials, Workbench, (functions,), settings.ray_workers, settings.address)
    if settings.processes == 1:
        return nullcontext(Alone(lab, Workbench(lab, functions)))
    return Crew(lab, min(settings.processes, settings.trials), Workbench, (functions,))


def _check(state: Mapping[str, Any], functions: Functions, trials: int, generations: int) -> None:
    """Refuse the state of a population that is not one of this search."""
    generation, policies, numbers = state["generation"], state["policies"], len(functions.start())
    if generation not in range(generations) or [len(policy) for policy in policies] != [numbers] * trials:
        raise ValueError(f"it must have one of {generations} generations, and {trials} policies of {numbers} numbers")
    functions.schedule(policies)  # refuses numbers that no policy has


def trial(recipe: Recipe) -> Recipe:
    """The recipe of a trial: few images, and WRN-40-2, as in PBA on CIFAR and in MetaAugment's paper on Omniglot.

    Its 200 epochs are PBA's on CIFAR; for Omniglot the paper does not say.

    Other data sets keep the recipe's own network and epochs.
    """
    recipe = replace(recipe, method="pba", transfer=False, copies=1)
    reduced = DATASETS[recipe.dataset].searched.get("pba")
    if reduced is None:
        return recipe
    return replace(recipe, per_class=reduced.per_class, network=reduced.network, epochs=200, lr=0.1, weight_decay=5e-4)


def work(rows: Sequence[Row]) -> str:
    """What the rows are, in words: intervals that trials were trained through."""
    return f"{number_of('interval', len(rows))} of {number_of('trial', len({row['trial'] for row in rows}))}"


def _functions(settings: Settings, recipe: Recipe) -> Functions:
    source = f"metaaugment search pba {recipe.name}: {settings.trials} trials of {recipe.network} on {recipe.dataset}"
    if settings.functions == "pba":
        return Functions(PBA_FUNCTIONS, "autoaugment", source)
    return Functions(PAPER_FUNCTIONS, recipe.space, source)
