"""`metaaugment bench step`: a plain training step and a joint step by each route, double backward too, in one run."""

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metaaugment.capture import step_of
from metaaugment.features import feature_dim
from metaaugment.lab.bench.record import by_turns, check_new, table, write
from metaaugment.lab.program import on_terminal
from metaaugment.lab.training.machine import choose_device
from metaaugment.learner import Learner
from metaaugment.networks import network
from metaaugment.policy import PolicyNetwork
from metaaugment.sampler import TransformationSampler

CLASSES = 100


@dataclass(frozen=True)
class Variant:
    """One way to make a step."""

    name: str
    route: str | None = None  # None: plain training
    lagged: bool = True
    every: int = 1
    captured: bool = False
    validation: int = 1  # mini-batches of validation images per policy update, processed four at a time


@dataclass(frozen=True)
class Figure:
    network: str
    variant: str
    milliseconds: float
    over_plain: float
    peak_mib: float | None
    memory_over_plain: float | None


def variants(captured: bool) -> list[Variant]:
    """With every=8 a figure is the average over eight steps; `by 8` means eight mini-batches of validation images."""
    joint = [
        Variant("difference, exact", "difference", lagged=False),
        Variant("difference, lagged", "difference"),
        Variant("difference, lagged, every 8", "difference", every=8),
        Variant("difference, lagged, every 8 by 8", "difference", every=8, validation=8),
    ]
    others = [Variant("forward, lagged", "forward"), Variant("double backward, lagged", "unrolled")]
    plain = Variant("plain")
    if not captured:
        return [plain, *joint, *others]
    graphs = [replace(v, name=f"{v.name}, captured", captured=True) for v in (plain, *joint)]
    return [*graphs, plain, *joint[:2], *others]


def run(names: tuple[str, ...], batch: int, seconds: float, device: str | None, out: Path | None) -> None:
    check_new(out)
    device = choose_device(device)
    console, figures = Console(force_terminal=on_terminal()), []
    for name in names or (("wrn-40-2", "wrn-28-10") if device == "cuda" else ("small-cnn",)):
        with console.status(f"{name}, batch {batch}, on {device}"):
            measured = measure(name, batch, seconds, device)
        console.print(report(name, batch, device, measured))
        figures += measured
    write(out, device, figures, batch=batch)


def measure(name: str, batch: int, seconds: float, device: str) -> list[Figure]:
    """Variants take turns; ratios are against the plain step of the same mode, captured or not."""
    chosen = variants(captured=device == "cuda")
    peaks = {v.name: peak(v, name, batch, device) for v in chosen if not v.captured}
    steps = {v: build(v, name, batch, device) for v in chosen}
    for variant, step in steps.items():
        for _ in range(4 * variant.every + 4):  # warm up, capture
            step()
    took = by_turns({v: again(step, v.every) for v, step in steps.items()}, seconds, device)
    median = {v: took[v] / v.every for v in chosen}
    plain = {v.captured: median[v] for v in chosen if v.route is None}
    figures = []
    for v in chosen:
        memory = peaks.get(v.name)
        share = memory / peaks["plain"] if memory and peaks["plain"] else None
        mib = memory / 2**20 if memory else None
        figures.append(Figure(name, v.name, 1000 * median[v], median[v] / plain[v.captured], mib, share))
    return figures


def again(step: Callable[[], object], times: int) -> Callable[[], object]:
    return lambda: [step() for _ in range(times)]


def build(variant: Variant, name: str, batch: int, device: str) -> Callable[[], object]:
    """A step of this kind, to be called repeatedly."""
    torch.manual_seed(0)
    half = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    net = network(name, CLASSES).to(device, memory_format=layout)  # type: ignore[call-overload]
    optimizer = sgd(net.parameters(), 0.1, device)

    def prepare(images: Tensor) -> Tensor:
        return (images.float() / 255).to(memory_format=layout)

    batches = data(batch, device)
    if variant.route is None:

        def plain(images: Tensor, labels: Tensor) -> None:
            with half:
                loss = F.cross_entropy(net(prepare(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        if variant.captured:
            return captured_plain(plain, next(batches))
        return lambda: plain(*next(batches))

    policy = PolicyNetwork(feature_dim(net)).to(device)
    learner = Learner(
        net, TransformationSampler(), policy, route=variant.route, lagged=variant.lagged, every=variant.every,
        prepare=prepare, part=4 * batch,
    )  # fmt: skip
    policy_optimizer = sgd(learner.policy_parameters(), 1e-3, device)
    step = step_of(learner, optimizer, policy_optimizer, captured=variant.captured)
    validation = batches if variant.validation == 1 else data(variant.validation * batch, device)

    def joint() -> None:
        with half:
            step(*next(batches), validation)

    return joint


def peak(variant: Variant, name: str, batch: int, device: str) -> float | None:
    """Peak memory of tensors during a step in bytes, parameters and optimizer included."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = build(variant, name, batch, device)
    for _ in range(2 * variant.every):
        step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(variant.every):
        step()
    return torch.cuda.max_memory_allocated() - before


def sgd(parameters: object, rate: float, device: str) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=5e-4, fused=device == "cuda")  # type: ignore[arg-type]


def data(batch: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The same few mini-batches on the device, over and over."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, batch, 3, 32, 32), dtype=torch.uint8, generator=generator).to(device)
    labels = torch.randint(0, CLASSES, (4, batch), generator=generator).to(device)
    return itertools.cycle(zip(images, labels, strict=True))


def captured_plain(step: Callable[..., None], batch: tuple[Tensor, Tensor]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*batch)
    # Keeps alive what the graph works on: the step's network and optimizer, and the batch.
    return lambda step=step, batch=batch: graph.replay()


def report(name: str, batch: int, device: str, figures: list[Figure]) -> Table:
    title = f"{name}, batch {batch}, on {device}" + (", bf16" if device == "cuda" else "")
    rows = []
    for f in figures:
        memory = ("–", "–") if f.peak_mib is None else (f"{f.peak_mib:,.0f}", f"{f.memory_over_plain:.2f}")
        rows.append((f.variant, f"{f.milliseconds:.2f}", f"{f.over_plain:.2f}", *memory))
    return table(title, ("step", "ms", "× plain", "MiB", "× MiB"), rows)
