"""`metaaugment bench transfer`: a step under a learned policy against a plain step, in one run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from metaaugment.capture import step_of
from metaaugment.embedding import K
from metaaugment.features import feature_dim
from metaaugment.lab.bench import step
from metaaugment.lab.bench.record import Columns, begin, by_turns, show, write
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


COLUMNS: Columns[Figure] = {
    "step": lambda f: f.step,
    "ms": lambda f: f"{f.milliseconds:.2f}",
    "× plain": lambda f: f"{f.over_plain:.2f}",
}


def run(batch: int, seconds: float, device: str | None, out: Path | None) -> None:
    device = begin(device, out)
    cases = {
        f"{name} under a policy with {eyes}, batch {batch}, on {device}": partial(
            measure, name, eyes, batch, seconds, device
        )
        for name, eyes in PAIRS[device]
    }
    write(out, device, show(cases, COLUMNS), batch=batch)


def measure(name: str, eyes: str, batch: int, seconds: float, device: str) -> list[Figure]:
    """Plain, under the whole policy, and under its p alone, in turns."""
    policy = untrained(eyes).to(device)
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
    task, batches = step.Task(name, device), step.data(batch, device)
    sampler, frozen, extractor = policy.parts((0.0,) * 3, (1.0,) * 3)
    learner = Learner(
        task.network, sampler, frozen, extractor=extractor, space=policy.space, fill=policy.source.fill,
        prepare=task.prepare,
    )  # fmt: skip
    one = step_of(learner, task.optimizer, captured=device == "cuda")
    return task.in_half(lambda: one(*next(batches)))
