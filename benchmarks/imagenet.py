"""Joint training of ResNet-50 at 224 × 224 against plain training, from memory and from a folder of files, in one run.

    python benchmarks/imagenet.py --out results/bench/imagenet.json

Images in memory lie on the device, so that only the step is timed. The folder has the shape of ImageNet, a thousand
classes of JPEG files of the usual sides and bytes; its pictures are synthetic, since decoding does not depend on what
they show. `reader` is what the worker processes decode while nothing trains; a joint step also reads validation images.
"""

import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console

from metaaugment.lab.bench.record import write
from metaaugment.lab.data import DataSet, dataset
from metaaugment.lab.data.batches import Batches, Reader
from metaaugment.lab.data.files import IMAGENET_MEAN, IMAGENET_STD
from metaaugment.lab.data.images import Images
from metaaugment.lab.experiments import run
from metaaugment.lab.experiments.experiment import assemble
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.training.machine import choose_device

# What is trained: the method, and the steps from one policy update to the next.
VARIANTS = {"baseline": ("baseline", 1), "randaugment": ("randaugment", 1), "lagged every 8": ("metaaugment", 8)}
PICTURE = (500, 375)  # sides of a usual photograph of ImageNet; with QUALITY about 110 kB, the mean there
QUALITY = 85
REPEATS = 4  # of each file in an epoch


@dataclass(frozen=True)
class Figure:
    source: str
    what: str
    images_per_second: float
    over_baseline: float | None  # in time
    peak_gib: float | None
    workers: int | None = None


def recipe(batch: int, size: int) -> Recipe:
    """The paper's recipe for ImageNet, but one transformation per sample, one phase, three epochs (one to warm up)."""
    return replace(
        RECIPES["imagenet-resnet-50"](), batch=batch, policy_batch=batch, size=size, copies=1,
        epochs=3, random_epochs=0, frozen_epochs=0, warmup_epochs=0, lagged=True,
    )  # fmt: skip


def in_memory(images: int, held_out: int, size: int, device: str) -> DataSet:
    """Images of noise: the values of pixels make no difference to the time."""
    train, val = (
        Images(torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, device=device), torch.arange(n) % 1000)
        for n in (images, held_out)
    )
    classes = tuple(map(str, range(1000)))
    return DataSet("imagenet", train, val, val, classes, IMAGENET_MEAN, IMAGENET_STD, (124, 116, 104))


def draw_class(root: Path, bases: np.ndarray, name: int) -> int:
    """Write the files of one class, ten to train and one to test, cropped from the bases; returns their bytes."""
    random = np.random.default_rng(name)
    total = 0
    for place in range(11):
        folder = root / ("val" if place == 10 else "train") / f"{name:04}"
        folder.mkdir(parents=True, exist_ok=True)
        width, height = PICTURE
        base = bases[random.integers(len(bases))]
        top, left = (random.integers(side - part + 1) for side, part in zip(base.shape, (height, width), strict=False))
        file = folder / f"{place}.jpg"
        Image.fromarray(base[top : top + height, left : left + width]).save(file, quality=QUALITY)
        total += file.stat().st_size
    return total


def cloud(seed: int) -> np.ndarray:
    """A picture whose spectrum falls as that of photographs does, 1/f, with the noise of a sensor."""
    width, height = (2 * side for side in PICTURE)
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    spectrum = np.fft.rfft2(random.standard_normal((3, height, width))) / (frequency + 1 / width)
    values = np.fft.irfft2(spectrum, (height, width))
    values = 128 + 60 * values / values.std() + 4 * random.standard_normal(values.shape)
    return values.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)


def draw_folder(root: Path, classes: int, processes: int) -> float:
    """Write the files of all classes; returns the mean bytes of a file."""
    with ProcessPoolExecutor(processes) as pool:
        bases = np.stack(list(pool.map(cloud, range(8))))
        total = sum(pool.map(partial(draw_class, root, bases), range(classes), chunksize=max(1, classes // 64)))
    return total / (11 * classes)


def measure(source: str, what: str, data: DataSet, base: Recipe, workers: int, device: str) -> Figure:
    """The speed of training alone: the median of the epochs after the first."""
    method, every = VARIANTS[what]
    experiment = assemble(replace(base, method=method, every=every), data, torch.device(device), Console(quiet=True))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(device=device, workers=workers)
        training = run.trainer(experiment, place, Path(folder), Reader(place.readers), [])
        training.run()
    speed = statistics.median(row["images_per_second"] for row in training.log.rows[1:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return Figure(source, what, speed, None, peak, None if source == "memory" else workers)


def reading(data: DataSet, batch: int, workers: int, device: str) -> Figure:
    """What worker processes decode per second, once they are all at work."""
    stream = Batches(data.train, batch, 0, torch.device(device), Reader(workers)).since(0)
    for _ in itertools.islice(stream, 2 * workers):  # skips what they read ahead
        pass
    started = time.perf_counter()
    count = sum(len(labels) for _, labels in itertools.islice(stream, 2 * workers))
    figure = Figure("folder", "reader", count / (time.perf_counter() - started), None, None, workers)
    stream.close()
    return figure


@contextmanager
def folder_of(classes: int, size: int, processes: int) -> Iterator[DataSet]:
    with tempfile.TemporaryDirectory() as root:
        mean = draw_folder(Path(root) / "imagenet", classes, processes)
        print(f"{11 * classes:,} files of {mean / 1000:.0f} kB", flush=True)
        data = dataset("imagenet", Path(root), size=size)
        # Each file several times: an epoch that fits into what is read ahead would not show the cost of reading.
        yield replace(data, train=data.train.take(torch.arange(len(data.train)).repeat(REPEATS)))


def main(batch: int = 256, size: int = 224, images: int = 8192, classes: int = 1000, workers: tuple[int, ...] = (4, 16),
         device: str | None = None, out: Path | None = None) -> None:  # fmt: skip
    device = choose_device(device)
    base, figures = recipe(batch, size), []

    def note(figure: Figure) -> None:
        plain = [f for f in figures if (f.source, f.what, f.workers) == (figure.source, "baseline", figure.workers)]
        if figure.what != "reader":
            ratio = plain[0].images_per_second / figure.images_per_second if plain else 1.0
            figure = replace(figure, over_baseline=ratio)
        figures.append(figure)
        print(asdict(figure), flush=True)
        gc.collect()
        torch.cuda.empty_cache()

    data = in_memory(images, 2 * batch, size, device)
    for what in VARIANTS:
        note(measure("memory", what, data, base, 0, device))
    with folder_of(classes, size, max(workers)) as data:
        for processes in workers:
            note(reading(data, batch, processes, device))
        for what in ("baseline", "lagged every 8"):
            note(measure("folder", what, data, base, max(workers), device))
    write(out, device, figures, batch=batch, size=size)


if __name__ == "__main__":
    tyro.cli(main)
