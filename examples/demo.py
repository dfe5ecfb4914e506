"""Three ways to train on few images, three seeds each, and a look at what the policy has learned.

    python examples/demo.py            # what `make demo` runs: a few minutes on two cores

Trains on ten images per class of scikit-learn's digits, tests on 597 others, and prints whatever comes out. Finished
runs are kept; one that was interrupted continues where it stopped.
"""

import os
import signal
import statistics
import sys
import time
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import metaaugment as ma
from metaaugment.lab.data import Images
from metaaugment.lab.experiments import run
from metaaugment.lab.experiments.export import learned_policy
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.report import learned
from metaaugment.lab.report.picture import save
from metaaugment.lab.training.json_file import write_json
from metaaugment.lab.training.machine import commit, machine
from metaaugment.lab.words import duration

METHODS = ("metaaugment", "randaugment", "baseline")  # the longest first, so that no core waits at the end


def recipe(method: str, seed: int, epochs: int) -> Recipe:
    """Sixteen pixels a side are plenty for digits that were scanned at eight."""
    return replace(RECIPES["digits"](), method=method, seed=seed, epochs=epochs, per_class=10, size=16)


def train(method: str, seed: int, epochs: int, folder: Path) -> tuple[str, int, float]:
    """The test accuracy of one run, in a process of its own."""
    torch.set_num_threads(1)
    out = folder / f"{method}-seed{seed}"
    place = Place(resume=out, device="cpu") if (out / "recipe.json").exists() else Place(out=out, device="cpu")
    return method, seed, run.train(recipe(method, seed, epochs), place, Console(quiet=True))["test_accuracy"]


def train_all(seeds: int, epochs: int, folder: Path) -> Generator[tuple[str, int, float], None, None]:
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
        runs = [processes.submit(train, method, seed, epochs, folder) for method in METHODS for seed in range(seeds)]
        try:
            for done in as_completed(runs):
                yield done.result()
        except BaseException:  # a signal included: the runs end after a checkpoint
            processes.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise


def table(accuracies: dict[str, list[float]]) -> Table:
    shown = Table(box=SIMPLE_HEAD)
    for column in ("method", "mean", "deviation", "each seed"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for method in reversed(METHODS):
        values = [100 * value for value in accuracies[method]]
        deviation = f"{statistics.stdev(values):.2f}" if len(values) > 1 else "–"
        shown.add_row(method, f"{statistics.mean(values):.2f}", deviation, "  ".join(f"{v:.2f}" for v in values))
    return shown


def draw(folder: Path, run_of: Path) -> list[Path]:
    """Draw p_{j,k}, and training images augmented by it with the weights they get."""
    policy = learned_policy(run_of)
    data = ma.dataset("digits", per_class=10, size=16)
    assert isinstance(data.train, Images)
    generator = torch.Generator().manual_seed(0)
    images = data.train.images.repeat(10, 1, 1, 1)
    augmented, t = policy.transform(images, generator)
    weights = policy.weights(augmented, t)
    return [
        save(
            learned.heat_map(policy.probabilities, "digits: learned distribution over pairs of functions"),
            folder / "distribution.png",
        ),
        save(
            learned.weighted_samples(augmented, t, weights, policy.space, "digits: what the policy makes of samples"),
            folder / "samples.png",
        ),
    ]


def main(out: Path = Path("demo"), seeds: int = 3, epochs: int = 300) -> None:
    console = Console()
    started = time.monotonic()
    total = len(METHODS) * seeds
    console.print(f"{total} runs of {epochs} epochs, {os.cpu_count()} at a time; logs are in {out / 'runs'}")
    accuracies: dict[str, dict[int, float]] = {method: {} for method in METHODS}
    with console.status("training"), closing(train_all(seeds, epochs, out / "runs")) as finished:
        for count, (method, seed, accuracy) in enumerate(finished, 1):
            accuracies[method][seed] = accuracy
            console.print(f"{count}/{total}  {method}, seed {seed}: {accuracy:.2%}", highlight=False)
    console.print(f"Test accuracy on digits in percent, 10 training images per class, {seeds} seeds:", highlight=False)
    by_seed = {name: [values[seed] for seed in range(seeds)] for name, values in accuracies.items()}
    console.print(table(by_seed))
    about = {"machine": machine("cpu"), "commit": commit(), "epochs": epochs}
    write_json(out / "accuracies.json", {**about, "accuracies": by_seed})
    for picture in draw(out, out / "runs" / "metaaugment-seed0"):
        console.print(str(picture), highlight=False)
    console.print(f"done in {duration(time.monotonic() - started)}", highlight=False)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        tyro.cli(main)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it is ending already
        sys.exit("stopped; the same command goes on from here")
