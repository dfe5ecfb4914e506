"""What some departures from the paper do to the outcome, with a small network that a CPU trains on Omniglot.

    python benchmarks/departures.py --data DIR --out results/bench/departures-cpu.json

Each variant changes one thing: the precision, the route to the alignment, or the images that the baseline trains on.
Joint training is the fast one, which a CPU has the time for.
Accuracy is that on the test images after the last epoch. Nothing is chosen by these figures. Finished runs are kept in
the file of figures, so that the same command continues.
"""

import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

from metaaugment.lab.bench.record import write
from metaaugment.lab.data import DataSet, Images
from metaaugment.lab.data.batches import once
from metaaugment.lab.experiments.experiment import data_of
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training.evaluation import evaluate


@dataclass(frozen=True)
class Variant:
    name: str
    method: str
    precision: Literal["bf16", "float32"] = "float32"
    route: str = "difference"
    validation_too: bool = False  # whether it trains on the validation images as well


VARIANTS = (
    Variant("baseline", "baseline"),
    Variant("baseline, validation images too", "baseline", validation_too=True),
    Variant("randaugment", "randaugment"),
    Variant("randaugment, bf16", "randaugment", "bf16"),
    Variant("metaaugment", "metaaugment"),
    Variant("metaaugment, bf16", "metaaugment", "bf16"),
    Variant("metaaugment, forward mode", "metaaugment", route="forward"),
)


@dataclass(frozen=True)
class Figure:
    variant: str
    seed: int
    images: int  # trained on
    accuracy: float  # on the test images
    seconds: float
    commit: list[str]


@dataclass(frozen=True)
class Settings:
    out: Path
    data: Path | None = None
    recipe: str = "omniglot-wrn-40-2-fast"
    network: str = "small-cnn"
    size: int = 16  # of an image, in pixels
    epochs: int = 20
    per_class: int | None = None
    seeds: int = 3
    variants: tuple[str, ...] = tuple(variant.name for variant in VARIANTS)
    processes: int = 2
    runs: Path = Path("runs/departures")

    def common(self) -> dict[str, Any]:
        """What all variants change about the recipe."""
        return {name: getattr(self, name) for name in ("network", "size", "epochs", "per_class")}


def with_validation(data: DataSet) -> DataSet:
    train, val = data.train, data.val
    assert isinstance(train, Images)
    assert isinstance(val, Images)
    both = Images(torch.cat([train.images, val.images]), torch.cat([train.labels, val.labels]))
    return replace(data, train=both)


def measure(variant: Variant, seed: int, settings: Settings) -> Figure:
    torch.set_num_threads(1)
    recipe = replace(
        RECIPES[settings.recipe](), **settings.common(), seed=seed, method=variant.method, route=variant.route
    )
    place, quiet = Place(data=settings.data, device="cpu", precision=variant.precision), Console(quiet=True)
    data = data_of(recipe, place, quiet)
    data = with_validation(data) if variant.validation_too else data
    folder = settings.runs / f"{variant.name}, seed {seed}"
    lab = Laboratory(recipe, place, data, folder, quiet)
    began, training = time.perf_counter(), lab.trainer(lab.experiment(), folder)
    # Spent before an interruption, maybe at another commit.
    before = sum(row["seconds"] for row in training.log.rows) + training.seconds
    training.run()
    with training.precision():
        score = evaluate(training.network, once(data.test, lab.device), training.learner.prepare)
    seconds = before + time.perf_counter() - began
    return Figure(variant.name, seed, len(data.train), score.top1, seconds, training.commits)


def finished(settings: Settings, about: dict[str, Any]) -> list[Figure]:
    """Figures that are kept already; refuses a file of other settings."""
    if not settings.out.exists():
        return []
    kept = json.loads(settings.out.read_text())
    if any(kept[name] != value for name, value in about.items()):
        raise SystemExit(f"{settings.out} has figures of other settings than {about}; move it away")
    return [Figure(**figure) for figure in kept["figures"]]


def main(settings: Settings) -> None:
    about = {"recipe": settings.recipe, **settings.common()}
    figures = finished(settings, about)
    done = {(figure.variant, figure.seed) for figure in figures}
    chosen = [variant for variant in VARIANTS if variant.name in settings.variants]
    left = [(variant, seed) for seed in range(settings.seeds) for variant in chosen if (variant.name, seed) not in done]
    with ProcessPoolExecutor(settings.processes, get_context("spawn")) as pool:
        for run in [pool.submit(measure, *one, settings) for one in left]:
            figures.append(run.result())
            print(json.dumps(asdict(figures[-1])), flush=True)
            write(settings.out, "cpu", figures, **about)


if __name__ == "__main__":
    main(tyro.cli(Settings))
