"""What the trainer costs beside the method: whole epochs against bare steps of `metaaugment bench step`, in one run.

    python benchmarks/epoch.py --data DIR --out results/bench/epoch.json

An epoch counts from one log row to the next: batches, steps, running sums, validation, log and checkpoint.
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

from metaaugment.bench import step
from metaaugment.bench.record import timed, write
from metaaugment.experiments import run
from metaaugment.experiments.paper import RECIPES
from metaaugment.training.log import Row
from metaaugment.training.machine import choose_device
from metaaugment.training.trainer import Trainer

VARIANTS = {
    "baseline": step.Variant("plain"),
    "metaaugment": step.Variant("difference, exact", "difference", lagged=False),
    "metaaugment lagged": step.Variant("difference, lagged", "difference"),
    "metaaugment lagged every 8": step.Variant("difference, lagged, every 8", "difference", every=8),
}


@dataclass(frozen=True)
class Figure:
    recipe: str
    what: str
    steps: int
    epoch_seconds: float
    bare_seconds: float
    epoch_over_bare: float


class Clock:
    """Notes when each epoch ends."""

    def began(self, trainer: Trainer) -> None:
        self.times = [time.perf_counter()]

    def stepped(self, trainer: Trainer) -> None:
        pass

    def ended_epoch(self, trainer: Trainer, row: Row) -> None:
        self.times.append(time.perf_counter())

    def ended(self, trainer: Trainer) -> None:
        pass


def measure(name: str, what: str, place: run.Place, epochs: int, device: str) -> Figure:
    variant = replace(VARIANTS[what], captured=device == "cuda")
    method = "baseline" if variant.route is None else "metaaugment"
    recipe = RECIPES[name]()
    recipe = replace(
        recipe, method=method, lagged=variant.lagged, every=variant.every, epochs=epochs, policy_batch=recipe.batch
    )
    experiment = run.prepare(recipe, place, Console(quiet=True))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = run.trainer(experiment, place, Path(folder), run.Reader(), [clock])
        trainer.run()
    epoch = statistics.median(after - before for before, after in zip(clock.times[1:], clock.times[2:], strict=False))
    steps = trainer.train.steps
    del trainer, experiment
    gc.collect()
    bare = step.build(variant, recipe.network, recipe.batch, device)
    for _ in range(8 * variant.every):
        bare()
    times = variant.every * max(1, min(steps, 200) // variant.every)
    seconds = statistics.median(timed(bare, times, device) / times for _ in range(5)) * steps
    return Figure(name, what, steps, epoch, seconds, epoch / seconds)


def main(recipes: tuple[str, ...] = ("cifar10-wrn-40-2",), data: Path | None = None, epochs: int = 5,
         device: str | None = None, out: Path | None = None) -> None:  # fmt: skip
    device = choose_device(device)
    figures = []
    for name in recipes:
        for what in VARIANTS:
            figures.append(measure(name, what, run.Place(data=data, device=device), epochs, device))
            print(asdict(figures[-1]), flush=True)
            torch.cuda.empty_cache()
    write(out, device, figures, epochs=epochs)


if __name__ == "__main__":
    tyro.cli(main)
