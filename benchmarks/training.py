"""Whole training: plain, RandAugment and MetaAugment side by side in one run, each against bare steps of its kind.

    python benchmarks/training.py omniglot-wrn-40-2 omniglot-wrn-28-10 --data DIR --out results/bench/training.json

An epoch is timed from one log row to the next: batches, steps, running sums, validation, log and checkpoint. A bare
step is that of `metaaugment bench step`, captured on a GPU; RandAugment is compared with the plain one.
"""

import gc
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import tyro
from rich.console import Console
from tyro.conf import Positional

from metaaugment.lab.bench import step
from metaaugment.lab.bench.record import timed, write
from metaaugment.lab.data import DataSet, dataset
from metaaugment.lab.data.batches import Reader
from metaaugment.lab.experiments import run
from metaaugment.lab.experiments.experiment import assemble
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.training.log import Row
from metaaugment.lab.training.machine import choose_device
from metaaugment.lab.training.trainer import Trainer, Watcher

# What is trained: the method, and the bare step that it is compared with.
VARIANTS = {
    "baseline": ("baseline", step.Variant("plain")),
    "randaugment": ("randaugment", step.Variant("plain")),
    "metaaugment": ("metaaugment", step.Variant("exact", "difference", lagged=False)),
    **{
        f"metaaugment lagged every {every}": ("metaaugment", step.Variant("lagged", "difference", every=every))
        for every in (1, 4, 8, 16)
    },
}


@dataclass(frozen=True)
class Figure:
    recipe: str
    what: str
    steps: int
    epoch_seconds: float
    steps_seconds: float  # of these, the steps alone; the rest is validation, log and checkpoint
    bare_seconds: float
    epoch_over_bare: float
    steps_over_bare: float
    images_per_second: float
    over_baseline: float  # in time


class Clock(Watcher):
    """Notes when each epoch ends, and how long its steps took."""

    def began(self, trainer: Trainer) -> None:
        self.times, self.steps = [time.perf_counter()], []

    def ended_epoch(self, trainer: Trainer, row: Row) -> None:
        self.times.append(time.perf_counter())
        self.steps.append(row["seconds"])


def measure(
    name: str,
    what: str,
    data: DataSet,
    place: Place,
    epochs: int,
    repeats: int,
    device: str,
    baseline: float | None,
) -> Figure:
    method, variant = VARIANTS[what]
    variant, recipe = replace(variant, captured=device == "cuda"), RECIPES[name]()
    recipe = replace(
        recipe, method=method, lagged=variant.lagged, every=variant.every, epochs=epochs, policy_batch=recipe.batch
    )
    experiment = assemble(recipe, data, torch.device(device), Console(quiet=True))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = run.trainer(experiment, place, Path(folder), Reader(), [clock])
        trainer.run()
    epoch = statistics.median(after - before for before, after in zip(clock.times[1:], clock.times[2:], strict=False))
    alone, steps = statistics.median(clock.steps[1:]), trainer.train.steps
    del trainer, experiment
    gc.collect()
    bare = step.build(variant, recipe.network, recipe.batch, device)
    for _ in range(8 * variant.every):
        bare()
    times = variant.every * max(1, min(steps, 100) // variant.every)
    seconds = statistics.median(timed(bare, times, device) / times for _ in range(repeats)) * steps
    images = steps * recipe.batch / epoch
    over = epoch / (baseline or epoch)
    return Figure(name, what, steps, epoch, alone, seconds, epoch / seconds, alone / seconds, images, over)


def main(recipes: Positional[tuple[str, ...]] = ("cifar10-wrn-40-2",), data: Path | None = None, epochs: int = 5,
         repeats: int = 5, variants: tuple[str, ...] = tuple(VARIANTS), device: str | None = None,
         out: Path | None = None) -> None:  # fmt: skip
    device = choose_device(device)
    figures: list[Figure] = []
    for name in recipes:
        baseline, recipe = None, RECIPES[name]()
        images = dataset(recipe.dataset, data, seed=recipe.split_seed, size=recipe.size, per_class=recipe.per_class)
        for what in dict.fromkeys(("baseline", *variants)):  # first what the others are compared with
            figures.append(measure(name, what, images, Place(device=device), epochs, repeats, device, baseline))
            baseline = baseline or figures[-1].epoch_seconds
            print(asdict(figures[-1]), flush=True)
            write(out, device, figures, epochs=epochs)  # after each one: they take minutes, and may be ended early
            torch.cuda.empty_cache()


if __name__ == "__main__":
    tyro.cli(main)
