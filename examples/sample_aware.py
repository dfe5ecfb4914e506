"""A data set whose right policy is known, to show that the learned one is sample-aware.

    python examples/sample_aware.py            # three seeds; --out FILE keeps the figures

Every image shows one of two small patterns, which is its label. In half of the images it lies in the middle; in the
others at the left or right border, where a move to that side pushes it out of the image and destroys the label. Half of
the training images are moved, to either side. A policy for the whole data set can only move images less often; one that
looks at the sample can take the weight from those whose pattern is gone: the example of the paper's introduction, in 20
by 20 pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

import metaaugment as ma
from metaaugment.lab.bench import record
from metaaugment.ops import INDEX

SIDE, SIZE = 20, 5  # of an image and of its pattern; a move is at most 10/32 of the image: 6 pixels
BACKGROUND = 100
LEFT, MIDDLE, RIGHT = 0, 7, SIDE - SIZE


@dataclass(frozen=True)
class Patterns:
    """Images, labels, and the column where an image's pattern begins."""

    images: Tensor
    labels: Tensor
    column: Tensor

    @staticmethod
    def draw(n: int, generator: torch.Generator) -> "Patterns":
        labels = torch.randint(0, 2, (n,), generator=generator)
        column = torch.tensor([LEFT, MIDDLE, MIDDLE, RIGHT])[torch.randint(0, 4, (n,), generator=generator)]
        row = torch.randint(0, SIDE - SIZE, (n,), generator=generator)
        contrast = torch.randint(40, 140, (n,), generator=generator)
        images = BACKGROUND + 25 * torch.randn(n, 1, SIDE, SIDE, generator=generator)
        for image, label, x, y, value in zip(images[:, 0], labels, column, row, contrast, strict=True):
            patch = image[y : y + SIZE, x : x + SIZE]
            (patch if label == 0 else patch.T)[::2] += value  # horizontal or vertical stripes
        return Patterns(images.clamp(0, 255).to(torch.uint8), labels, column)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Mini-batches without end."""
        while True:
            chosen = torch.randint(0, len(self.images), (size,), generator=generator)
            yield self.images[chosen], self.labels[chosen]

    def destroyed_by(self, t: ma.Transformation) -> Tensor:
        """Whether a move pushed the pattern out: to the left with sign +, to the right with sign −."""
        left, right = (t.signs[:, 0] == 1) & (self.column == LEFT), (t.signs[:, 0] == -1) & (self.column == RIGHT)
        return left | right


@dataclass(frozen=True)
class Figures:
    """How well weights tell moved samples whose pattern is gone from those that still show it."""

    seed: int
    sample_aware: float  # AUC of the weights
    per_transformation: float  # AUC of the best that a policy for the whole data set can do with them
    intact_over_destroyed: float  # ratio of mean weights


class MoveHalf(ma.UniformSampler):
    """Half of the samples move sideways by 5 or 6 pixels; a sampler is any part that draws transformations."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> ma.Transformation:
        first = torch.where(torch.rand(n, generator=generator) < 0.5, INDEX["TranslateX"], INDEX["Identity"])
        t = ma.Transformation.draw(first, torch.full((n,), INDEX["Identity"]), generator)
        return ma.Transformation(t.first, t.second, 8 + 0.2 * t.magnitudes, t.signs)


def task_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * (SIDE // 2) ** 2, 64), nn.ReLU(), nn.Linear(64, 2),
    )  # fmt: skip


def prepare(images: Tensor) -> Tensor:
    return (images - float(BACKGROUND)) / 50


def learn(seed: int, steps: int = 500) -> Figures:
    """Train once, and judge the weights on fresh images."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    train, validation, fresh = (Patterns.draw(n, generator) for n in (20_000, 2000, 4000))
    network = task_network()
    learner = ma.Learner(
        network, MoveHalf(), ma.PolicyNetwork(64), lagged=True, prepare=prepare, generator=generator, fill=BACKGROUND
    )
    task = torch.optim.SGD(network.parameters(), 0.02, momentum=0.9, weight_decay=5e-4)
    policy = torch.optim.Adam(learner.policy_parameters(), 3e-4)
    batches, held_out = train.batches(128, generator), validation.batches(512, generator)
    for _ in range(steps):
        learner.step(*next(batches), task, policy, held_out)
    return judge(seed, learner, fresh)


def judge(seed: int, learner: ma.Learner, patterns: Patterns) -> Figures:
    seen = learner.look(patterns.images, patterns.labels, seed=0)
    moved = seen.transformation.first == INDEX["TranslateX"]
    outputs, destroyed = seen.outputs[moved], patterns.destroyed_by(seen.transformation)[moved]
    # A policy for the whole data set knows only the transformation: the function, and its magnitude in ten steps.
    step = ((seen.transformation.magnitudes[moved, 0] - 8) * 5).long().clamp(max=9)
    average = torch.stack([outputs[step == s].mean() for s in range(10)])[step]
    return Figures(
        seed,
        sample_aware=auc(outputs[~destroyed], outputs[destroyed]),
        per_transformation=auc(average[~destroyed], average[destroyed]),
        intact_over_destroyed=(outputs[~destroyed].mean() / outputs[destroyed].mean()).item(),
    )


def auc(higher: Tensor, lower: Tensor) -> float:
    """How often an element of the first is above one of the second; ties count half."""
    difference = higher[:, None] - lower[None, :]
    return ((difference > 0).double() + (difference == 0).double() / 2).mean().item()


def main(seeds: int = 3, out: Path | None = None) -> None:
    found = []
    for seed in range(seeds):
        found.append(learn(seed))
        print(found[-1], flush=True)
    record.write(out, "cpu", found)


if __name__ == "__main__":
    tyro.cli(main)
