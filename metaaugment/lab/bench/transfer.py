"""`metaaugment bench transfer`: a step under a learned policy against a plain step, in one run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from metaaugment.capture import step_of
from metaaugment.embedding import K
from metaaugment.features import feature_dim
from metaaugment.lab.bench import step
from metaaugment.lab.bench.record import by_turns, check_new, table, write
from metaaugment.lab.program import on_terminal
from metaaugment.lab.training.machine import choose_device
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.learned.source import Source
from metaaugment.learner import Learner
from metaaugment.networks import network
from metaaugment.ops import find_space
from metaaugment.policy import PolicyNetwork

# The task network, and the network that the policy sees through; on a GPU in our direction, then in the paper's.
PAIRS = {"cuda": (("wrn-28-10", "wrn-40-2"), ("wrn-40-2", "wrn-28-10")), "cpu": (("small-cnn", "small-cnn"),)}


@dataclass(frozen=True)
class Figure:
    network: str
    eyes: str
    step: str
    milliseconds: float
    over_plain: float


def run(batch: int, seconds: float, device: str | None, out: Path | None) -> None:
    check_new(out)
    device = choose_device(device)
    console, figures = Console(force_terminal=on_terminal()), []
    for name, eyes in PAIRS[device]:
        with console.status(f"{name} under a policy that sees through {eyes}, batch {batch}, on {device}"):
            measured = measure(name, eyes, batch, seconds, device)
        console.print(report(measured, batch, device))
        figures += measured
    write(out, device, figures, batch=batch)


def measure(name: str, eyes: str, batch: int, seconds: float, device: str) -> list[Figure]:
    """Plain, under the whole policy, and under its p alone, in turns. Policy and eyes must stay unchanged."""
    policy = untrained(eyes).to(device)
    before = [value.clone() for value in _tensors(policy)]
    captured = device == "cuda"
    steps = {
        "plain": step.build(step.Variant("plain", captured=captured), name, batch, device),
        "under the policy": build(policy, name, batch, device),
        "under p alone": build(policy.sampler_only().to(device), name, batch, device),
    }
    for one in steps.values():
        for _ in range(8):  # warm up, capture
            one()
    median = by_turns(steps, seconds, device)
    assert all(torch.equal(one, other) for one, other in zip(before, _tensors(policy), strict=True))
    return [Figure(name, eyes, what, 1000 * value, value / median["plain"]) for what, value in median.items()]


def untrained(eyes: str) -> LearnedPolicy:
    """A policy that costs what a learned one costs."""
    torch.manual_seed(0)
    net = network(eyes, step.CLASSES)
    source = Source(
        eyes, step.CLASSES, 3, find_space("metaaugment"), (0.5,) * 3, (0.25,) * 3, fill=(128,) * 3, size=(32, 32)
    )
    return LearnedPolicy(
        torch.full((K, K), 1 / K**2, dtype=torch.float64), source, PolicyNetwork(feature_dim(net)), net
    )


def build(policy: LearnedPolicy, name: str, batch: int, device: str) -> Callable[[], object]:
    torch.manual_seed(0)
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    net: nn.Module = network(name, step.CLASSES).to(device, memory_format=layout)  # type: ignore[call-overload]
    optimizer = step.sgd(net.parameters(), 0.1, device)
    sampler, frozen, extractor = policy.parts((0.0,) * 3, (1.0,) * 3)
    learner = Learner(
        net, sampler, frozen, extractor=extractor, space=policy.space, fill=policy.source.fill,
        prepare=lambda images: (images.float() / 255).to(memory_format=layout),
    )  # fmt: skip
    half = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    batches = step.data(batch, device)
    one = step_of(learner, optimizer, captured=device == "cuda")

    def transferred() -> None:
        with half:
            one(*next(batches))

    return transferred


def _tensors(policy: LearnedPolicy) -> list[torch.Tensor]:
    return [policy.probabilities, *(value for module in policy.modules for value in module.state_dict().values())]


def report(figures: list[Figure], batch: int, device: str) -> Table:
    one = figures[0]
    title = f"{one.network} under a policy with {one.eyes}, batch {batch}, on {device}"
    rows = [(figure.step, f"{figure.milliseconds:.2f}", f"{figure.over_plain:.2f}") for figure in figures]
    return table(title, ("step", "ms", "× plain"), rows)
