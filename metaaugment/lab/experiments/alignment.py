"""The alignment of training samples, augmented as in a run, with the gradients of several validation draws."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count, takewhile

import torch
from jaxtyping import Float
from torch import Tensor

from metaaugment.embedding import K, embed
from metaaugment.lab.data.batches import Batches, once
from metaaugment.lab.data.splits import Split
from metaaugment.lab.seeds import HALVES, SAMPLES, derived_seed
from metaaugment.learner import Learner
from metaaugment.observation import Observation
from metaaugment.ops import OPS
from metaaugment.policy import as_policy, clues
from metaaugment.transformation import Transformation

SMALLEST = 32  # validation images of the smallest draw
REPEATS = 4  # times that the validation images are split at random
ENOUGH = 2048  # samples to compare draws by; only predictions, which use the halves, gain from more

# Wraps a loop to show how far it is; the string says what the loop does.
Steps = Callable[[Iterable[int], str], Iterable[int]]


@dataclass(frozen=True)
class Samples:
    """What is known of training samples, augmented as in the run: one row each, on the CPU."""

    known: dict[str, Tensor]  # by the names that `INPUTS` uses
    place: Tensor  # of the image in the training split; an image may be there several times
    outputs: Float[Tensor, " n"] | None  # the policy's; None where there is none
    # For each repetition, s by two disjoint validation draws; keyed by their size, the largest being halves. Smaller
    # draws have s of the first samples only.
    alignment: dict[int, list[tuple[Tensor, Tensor]]]

    @property
    def halves(self) -> list[tuple[Tensor, Tensor]]:
        return self.alignment[max(self.alignment)]


def collect(learner: Learner, train: Batches, validation: Split, samples: int, seed: int, steps: Steps) -> Samples:
    """Training samples, and their alignment with each validation draw.

    Samples are recomputed in each repetition, so that the gradients of only one repetition are in memory at a time.
    """
    batches = samples // (train.batch * learner.copies)
    known: list[dict[str, Tensor]] = []
    alignment: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for repeat in range(REPEATS):
        drawn = draws(validation.labels.cpu(), derived_seed(seed, HALVES, repeat))
        sides = [side for both in drawn.values() for side in both]
        turn = f"{repeat + 1} of {REPEATS}"
        gradients = [
            validation_gradient(learner, validation, sides[place], train)
            for place in steps(range(len(sides)), f"validation gradients, {turn}")
        ]
        rows: list[list[Tensor]] = [[] for _ in sides]
        stream = train.since(0)
        for step in steps(range(batches), f"alignment of training samples, {turn}"):
            look = learner.look(*next(stream), derived_seed(seed, SAMPLES, step))
            of_halves = slice(-2 if step * len(look.labels) >= ENOUGH else None, None)
            for row, v in zip(rows[of_halves], gradients[of_halves], strict=True):
                row.append(learner.alignment(look, v).detach().cpu().double())
            if repeat == 0:
                place = train.places(step).repeat_interleave(learner.copies, 0)
                seen = {"place": place, "outputs": look.outputs.double(), **_known(look)}
                known.append({name: value.detach().cpu() for name, value in seen.items()})
        s = [torch.cat(row) for row in rows]
        for size, both in zip(drawn, zip(s[::2], s[1::2], strict=True), strict=True):
            alignment.setdefault(size, []).append(both)
    joined = {name: torch.cat([part[name] for part in known]) for name in known[0]}
    measured = [side for repeated in alignment.values() for both in repeated for side in both]
    if not all(value.isfinite().all() for value in (*measured, *joined.values())):
        raise ValueError(
            "the run's network or its policy gives numbers that are not finite; there is nothing to diagnose"
        )
    place, outputs = joined.pop("place"), joined.pop("outputs")
    if not ((joined["first"] < K) & (joined["second"] < K)).all():
        joined["embedding"] = joined["magnitudes"]  # the paper's embedding has no place for some of the functions
    return Samples(
        known=joined,
        place=place,
        outputs=None if as_policy(learner.policy).equal else outputs,
        alignment=alignment,
    )


def draws(labels: Tensor, seed: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Pairs of disjoint draws by their size, up to halves; the smaller ones are random, as a policy update's are."""
    both = halves(labels, seed)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    sizes = takewhile(lambda size: size < len(both[0]), (SMALLEST * 2**k for k in count()))
    return {size: (order[:size], order[size : 2 * size]) for size in sizes} | {len(both[0]): both}


def halves(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two disjoint halves with the same number of images of each class.

    Of two plain random halves, one has more of a class and the other less. This would dominate their gradients, with
    opposite signs.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[labels[order].argsort(stable=True)]
    classes = labels[by_class]
    turn = torch.empty_like(order)  # the place of an image among those of its class
    turn[by_class] = torch.arange(len(order)) - torch.searchsorted(classes, classes)
    number = torch.bincount(labels)[labels]
    paired = turn < number - number % 2
    return order[(paired & (turn % 2 == 0))[order]], order[(paired & (turn % 2 == 1))[order]]


def _known(look: Observation) -> dict[str, Tensor]:
    """What a policy could be told about the samples."""
    t = look.transformation
    paper = Transformation(t.first.clamp(max=K - 1), t.second.clamp(max=K - 1), t.magnitudes, t.signs)
    return {
        "first": t.first,
        "second": t.second,
        "magnitudes": t.magnitudes.float(),
        "pair": t.first * len(OPS) + t.second,
        "embedding": embed(paper).float(),
        "feature": look.features.float(),
        "clues": clues(look.logits, look.labels),
        "label": look.labels.long(),
    }


def validation_gradient(learner: Learner, split: Split, places: Tensor, like: Batches) -> list[Tensor]:
    """Gradient of these images' mean loss, in parts of at most a mini-batch so that memory does not grow with them."""
    total: list[Tensor] = []
    size = -(-len(places) // -(-len(places) // like.batch))  # equal parts: a single image has no batch statistics
    for images, labels in once(split.take(places.to(split.labels.device)), like.device, like.reader, size):
        share = len(labels) / len(places)
        part = [share * gradient for gradient in learner.validation_gradient(images, labels)]
        total = [a + b for a, b in zip(total, part, strict=True)] if total else part
    return total
