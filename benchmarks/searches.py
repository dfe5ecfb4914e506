"""Do searches find better policies than chance? Each against random policies of its own space, on few digits.

    python benchmarks/searches.py --out results/searches/digits.json

For each seed the digits are split anew: 20 images of each class to train on, 100 for validation, and the other 900 of
the training split held out from the search. Network, epochs and seed of the final training are the same for the found
policy and the random ones, with whose mean the found one is compared. Nothing is chosen by these figures.
"""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
import tyro
from rich.console import Console

from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.controller import FUNCTIONS, LEVELS, PROBABILITIES
from metaaugment.lab.baselines.found import FoundPolicy, Function, Schedule, SubPolicies
from metaaugment.lab.bench.record import write
from metaaugment.lab.data import DataSet, dataset
from metaaugment.lab.data.batches import once
from metaaugment.lab.data.splits import split
from metaaugment.lab.experiments.experiment import assemble
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search import auto_augment, dada, faa, pba
from metaaugment.lab.search.population import MAX_LEVEL, MAX_TENTHS
from metaaugment.lab.search.relaxed import FUNCTIONS as DADA_FUNCTIONS
from metaaugment.lab.search.run import SEARCHES, search
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.seeds import derived_seed
from metaaugment.lab.training.evaluation import evaluate
from metaaugment.ops import PAPER_OPS

PER_CLASS, CLASSES, RANDOM = 20, 10, 3
CPU = torch.device("cpu")

# Each search by its name: the system, its settings, and the epochs of a trial.
SIZES: dict[str, tuple[str, Any, int]] = {
    "faa": ("faa", faa.Settings(folds=2, trials=100, best=5), 40),
    "faa --draws 1": ("faa", faa.Settings(folds=2, trials=100, best=5, draws=1), 40),
    "pba": ("pba", pba.Settings(trials=8, interval=4), 40),
    "dada": ("dada", dada.Settings(), 40),
    "autoaugment": ("autoaugment", auto_augment.Settings(children=40), 20),
}


@dataclass(frozen=True)
class Figure:
    search: str
    seed: int
    trials: int
    search_seconds: float
    found: float  # accuracy on the held-out images
    random: list[float]
    first_tenth: float  # mean objective of the search's own trials
    last_tenth: float


def random_policy(found: FoundPolicy, random: Random) -> FoundPolicy:
    """A policy as large as the found one, of the same space, with everything else random."""
    if isinstance(found, Schedule):
        stages = tuple(
            replace(stage, functions=tuple(
                Function(f.name, random.randint(0, MAX_TENTHS) / 10, random.randint(0, MAX_LEVEL))
                for f in stage.functions
            ))
            for stage in found.stages
        )  # fmt: skip
        return replace(found, stages=stages)
    assert isinstance(found, SubPolicies)
    draw = DRAWS[found.system]
    return replace(found, sub_policies=tuple(draw(random) for _ in found.sub_policies))


def _continuous(names: list[str]) -> Callable[[Random], Function]:
    return lambda random: Function(random.choice(names), random.random(), random.random())


def _pair(draw: Callable[[Random], Function]) -> Callable[[Random], tuple[Function, Function]]:
    return lambda random: (draw(random), draw(random))


def _of_controller(random: Random) -> Function:
    probability, level = random.randrange(PROBABILITIES) / (PROBABILITIES - 1), random.randrange(LEVELS)
    return Function(random.choice(FUNCTIONS), probability, level)


def _two_different(random: Random) -> tuple[Function, Function]:
    first, second = sorted(random.sample(range(len(DADA_FUNCTIONS)), 2))
    return (
        Function(DADA_FUNCTIONS[first], random.random(), random.random()),
        Function(DADA_FUNCTIONS[second], random.random(), random.random()),
    )


DRAWS: dict[str, Callable[[Random], tuple[Function, Function]]] = {
    "faa": _pair(_continuous([op.name for op in PAPER_OPS])),
    "dada": _two_different,
    "autoaugment": _pair(_of_controller),
}


def divided(seed: int) -> tuple[DataSet, Any]:
    """The digits that a search sees, and those held out from it."""
    whole = dataset("digits", seed=seed)
    chosen, rest = split(whole.train.labels, seed, [PER_CLASS] * CLASSES)
    return replace(whole, train=whole.train.take(chosen)), whole.train.take(rest)


def accuracy(policy: FoundPolicy, recipe: Recipe, data: DataSet, held_out: Any, folder: Path) -> float:
    """Accuracy on the held-out images of a network trained under a policy."""
    lab = Laboratory(recipe, Place(device="cpu"), data, folder, Console(quiet=True))
    experiment = replace(assemble(recipe, data, CPU, Console(quiet=True)), found=policy)
    lab.trainer(experiment, folder).run()
    return evaluate(experiment.network, once(held_out, CPU), experiment.normalization()).top1


def measure(name: str, seed: int) -> Figure:
    torch.set_num_threads(1)
    system, settings, epochs = SIZES[name]
    kind, recipe = SEARCHES[system], replace(RECIPES["digits"](), method=system)
    trial = replace(kind.trial(recipe), per_class=PER_CLASS, split_seed=seed, seed=seed, epochs=epochs)
    data, held_out = divided(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = time.perf_counter()
        file = search(kind, trial, settings, Place(out=folder / "search", device="cpu"), Console(quiet=True))
        seconds = time.perf_counter() - started
        lab = Laboratory(trial, Place(), data, folder / "search", Console(quiet=True))
        objectives = [row["objective"] for row in lab.trials()]
        found, random = published.find(file), Random(derived_seed(seed, 0))
        final = replace(recipe, seed=seed)
        scores = [
            accuracy(policy, final, data, held_out, folder / str(place))
            for place, policy in enumerate([found, *(random_policy(found, random) for _ in range(RANDOM))])
        ]
    tenth = max(1, len(objectives) // 10)
    first, last = statistics.mean(objectives[:tenth]), statistics.mean(objectives[-tenth:])
    return Figure(name, seed, len(objectives), seconds, scores[0], scores[1:], first, last)


def table(figures: list[Figure]) -> list[str]:
    """Mean differences over the seeds with their standard errors."""
    lines = ["| search | trials | found | random | difference ± standard error |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(figure.search for figure in figures):
        mine = [figure for figure in figures if figure.search == name]
        pairs = [(figure.found, statistics.mean(figure.random)) for figure in mine]
        differences = [100 * (found - random) for found, random in pairs]
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        found, random = (100 * statistics.mean(values) for values in zip(*pairs, strict=True))
        lines.append(
            f"| {name} | {mine[0].trials} | {found:.2f} | {random:.2f} | "
            f"{statistics.mean(differences):+.2f} ± {error:.2f} |"
        )
    return lines


def main(searches: tuple[str, ...] = tuple(SIZES), seeds: int = 5, processes: int = 2, out: Path | None = None) -> None:
    figures: list[Figure] = []
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        runs = [pool.submit(measure, name, seed) for seed in range(seeds) for name in searches]
        for run in runs:
            figures.append(run.result())
            print(json.dumps(vars(figures[-1])), flush=True)
    figures.sort(key=lambda figure: (list(SIZES).index(figure.search), figure.seed))
    print("\n".join(table(figures)))
    write(out, "cpu", figures, per_class=PER_CLASS, random_policies=RANDOM)


if __name__ == "__main__":
    tyro.cli(main)
