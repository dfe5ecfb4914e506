"""`metaaugment bench ops`: two functions per image, ours and the peers' side by side in one run.

All systems of a comparison take turns in short rounds, so that a slow moment of the machine affects each of them, and
the figure is the median round. Pillow gets exactly the transformations that ours gets; torchvision, timm and kornia
draw their own RandAugment of two functions per image, which is the same work except for the drawing.
"""

import importlib
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metaaugment.lab.bench import pillow
from metaaugment.lab.bench.record import by_turns, check_new, table, write
from metaaugment.lab.program import on_terminal
from metaaugment.lab.training.machine import choose_device
from metaaugment.ops import OPS, PAPER_OPS, find_space
from metaaugment.transformation import Transformation, apply

FILL = (128, 128, 128)
CASES = {"cpu": [(512, 32), (64, 224)], "cuda": [(128, 32), (4096, 32), (64, 224)]}  # images, side


@dataclass(frozen=True)
class Figure:
    """One system's images per second, and how many times as fast ours is in the same comparison."""

    device: str
    size: int
    n: int
    system: str
    images_per_second: float
    ours_over_it: float


def run(seconds: float, device: str | None, out: Path | None) -> None:
    """Measure, print the table, and write the figures where asked."""
    check_new(out)
    device = choose_device(device)
    console = Console(force_terminal=on_terminal())
    figures, absent = [], libraries()[1]
    for n, size in CASES[device]:
        with console.status(f"{n} images of {size}×{size} on {device}"):
            compared = compare(n, size, device, seconds)
        console.print(report(compared))
        figures += compared
    for name, reason in absent.items():
        console.print(f"{name} is not compared: {reason}", highlight=False)
    write(out, device, figures, absent=absent)


def compare(n: int, size: int, device: str, seconds: float) -> list[Figure]:
    """All systems on n images of one size, in turns."""
    images, t = batch(n, size, device)
    systems: dict[str, tuple[int, Callable[[], object]]] = {"metaaugment": (n, lambda: apply(images, t, fill=FILL))}
    if device == "cuda":
        systems["metaaugment, in a CUDA graph"] = (n, captured(lambda: apply(images, t, fill=FILL)))
    few = min(n, 64)
    pictures = [to_pillow(image) for image in images[:few]]
    steps = pillow_steps(t[:few], size)
    systems["Pillow, image by image"] = (few, lambda: pillow_apply(pictures, steps))
    for name, one in peers().items():
        inputs = pictures if name in PILLOW_PEERS else list(images[:few])
        systems[name] = (few, lambda one=one, inputs=inputs: [one(image) for image in inputs])
    took = by_turns({name: call for name, (_, call) in systems.items()}, seconds, device)
    rates = {name: systems[name][0] / took[name] for name in systems}
    if device == "cpu":
        rates["Pillow, in two processes"] = pillow_in_processes(2, size, seconds)
    ours = rates["metaaugment"]
    return [Figure(device, size, n, name, rate, ours / rate) for name, rate in rates.items()]


def batch(n: int, size: int, device: str) -> tuple[Tensor, Transformation]:
    """Photo-like content: smooth, with noise on it, all 256 values used. Functions in equal shares."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    noisy = smooth * 255 + 12 * torch.randn(n, 3, size, size, generator=generator)
    functions = torch.randint(0, len(PAPER_OPS), (2, n), generator=generator)
    t = Transformation.draw(functions[0], functions[1], generator)
    return noisy.clamp(0, 255).to(torch.uint8).to(device), t.to(device)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as one replayed CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# -- Pillow ---------------------------------------------------------------------------------------------------------

Steps = list[list[tuple[str, float]]]


def to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().cpu().numpy())


def pillow_steps(t: Transformation, size: int) -> Steps:
    """Name and argument of each function, worked out beforehand: only Pillow's own work is timed."""
    t = t.to("cpu")
    ops = torch.stack([t.first, t.second], 1)
    arguments = find_space("metaaugment").arguments(ops, t.magnitudes, t.signs, size, size)
    pairs = zip(ops.tolist(), arguments.tolist(), strict=True)
    return [[(OPS[op].name, argument) for op, argument in zip(*pair, strict=True)] for pair in pairs]


def pillow_apply(pictures: list[Image.Image], steps: Steps) -> None:
    """From Pillow images to Pillow images: no conversion is charged to it."""
    for picture, functions in zip(pictures, steps, strict=True):
        for name, argument in functions:
            picture = pillow.apply_function(picture, name, argument, FILL)


def pillow_in_processes(count: int, size: int, seconds: float) -> float:
    """Images per second of several processes that run at the same time, added up."""
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.map(pillow_worker, [(size, 0.1)] * count, chunksize=1)
        return sum(pool.map(pillow_worker, [(size, seconds)] * count, chunksize=1))


def pillow_worker(job: tuple[int, float]) -> float:
    size, seconds = job
    images, t = batch(64, size, "cpu")
    pictures, steps = [to_pillow(image) for image in images], pillow_steps(t, size)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        pillow_apply(pictures, steps)
        done += len(pictures)
    return done / (time.perf_counter() - start)


# -- peers ------------------------------------------------------------------------------------------------------------

PILLOW_PEERS = ("timm on Pillow", "torchvision v2 on Pillow")  # these are given Pillow images


def peers() -> dict[str, Callable[[object], object]]:
    """RandAugment of two functions by each library that is installed.

    Called image by image, since each of them draws one pair of functions per call."""
    modules, _ = libraries()
    found = {}
    if "torchvision" in modules:
        augment = modules["torchvision"].RandAugment(num_ops=2)
        found["torchvision v2 on tensors"] = found["torchvision v2 on Pillow"] = augment
    if "timm" in modules:
        configured = "rand-m9-n2-mstd0.5-p1.0", {"translate_const": 10}
        found["timm on Pillow"] = modules["timm"].rand_augment_transform(*configured)
    if "kornia" in modules:
        batched = modules["kornia"].RandAugment(n=2, m=9)
        found["kornia"] = lambda image: batched(image[None].to(torch.float32) / 255)
    return found


def libraries() -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The peers' modules that can be imported, and for the others the reason why not."""
    define_missing_operators()
    names = {
        "torchvision": "torchvision.transforms.v2",
        "timm": "timm.data.auto_augment",
        "kornia": "kornia.augmentation.auto",
    }
    modules, reasons = {}, {}
    for name, module in names.items():
        try:
            modules[name] = importlib.import_module(module)
        except ImportError as error:
            reasons[name] = str(error)
    return modules, reasons


def define_missing_operators() -> None:
    """Declare two compiled operators that torchvision's published build looks for, and a CPU build of torch lacks.

    Its transforms can then be imported; nothing here calls the operators."""
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        global _LIBRARY
        _LIBRARY = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_LIBRARY: torch.library.Library | None = None


# -- what people see ------------------------------------------------------------------------------------------------


def report(figures: list[Figure]) -> Table:
    """The figures of one comparison."""
    n, size, device = figures[0].n, figures[0].size, figures[0].device
    title = f"{n} images of {size}×{size} on {device}, two functions each"
    rates = [(f.system, f.images_per_second, f.ours_over_it) for f in figures]
    rows = [(system, f"{rate:,.0f}", f"{1000 * n / rate:.3f}", f"{ours:.2f}") for system, rate, ours in rates]
    return table(title, ("system", "images/s", "ms per batch", "our speedup"), rows)
