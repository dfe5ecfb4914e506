"""The alignment of training samples, augmented as in a run, with the gradients of several validation draws."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from metaaugment.data.batches import Batches, derived_seed, once
from metaaugment.data.splits import Split
from metaaugment.embedding import K, embed
from metaaugment.learner import Learner
from metaaugment.observation import Observation
from metaaugment.ops import OPS
from metaaugment.policy import clues
from metaaugment.transformation import Transformation

SMALLEST = 32  # validation images of a draw
REPEATS = 4  # of random halves

# Wraps a loop to show how far it is, with what it does.
Steps = Callable[[Iterable[int], str], Iterable[int]]


@dataclass(frozen=True)
class Samples:
    """What is known of training samples, augmented as in the run: one row each, on the CPU."""

    known: dict[str, Tensor]  # by the names that `INPUTS` uses
    place: Tensor  # of the image in the training split, which may be there several times
    outputs: Float[Tensor, " n"] | None  # the policy's; None where there is none
    # By the size of two disjoint validation draws, the largest being halves: s by both, for each repetition.
    alignment: dict[int, list[tuple[Tensor, Tensor]]]

    @property
    def halves(self) -> list[tuple[Tensor, Tensor]]:
        return self.alignment[max(self.alignment)]


def collect(learner: Learner, train: Batches, validation: Split, samples: int, seed: int, steps: Steps) -> Samples:
    """Training samples, and their alignment with each validation draw."""
    repeated = [halves(validation.labels.cpu(), derived_seed(seed, 0, repeat)) for repeat in range(REPEATS)]
    half = len(repeated[0][0])
    sizes = [*(size for k in range(64) if (size := SMALLEST * 2**k) < half), half]
    draws = [side[:size] for both in repeated for size in sizes for side in both]
    gradients = [
        validation_gradient(learner, validation, draws[place], train)
        for place in steps(range(len(draws)), "validation gradients")
    ]
    stream = train.since(0)
    rows: list[list[Tensor]] = [[] for _ in draws]
    known: list[dict[str, Tensor]] = []
    for step in steps(range(samples // (train.batch * learner.copies)), "alignment of training samples"):
        look = learner.look(*next(stream), derived_seed(seed, 1, step))
        for row, v in zip(rows, gradients, strict=True):
            row.append(learner.alignment(look, v).detach().cpu().double())
        place = train.order(step // train.steps)[step % train.steps].repeat_interleave(learner.copies, 0)
        seen = {"place": place, "outputs": look.outputs.double(), **_known(look)}
        known.append({name: value.detach().cpu() for name, value in seen.items()})
    joined = {name: torch.cat([part[name] for part in known]) for name in known[0]}
    s = [torch.cat(row) for row in rows]
    if not all(value.isfinite().all() for value in (*s, *joined.values())):
        raise ValueError(
            "the run's network or its policy gives numbers that are not finite; there is nothing to diagnose"
        )
    sampled = iter(s)
    drawn = [(size, (next(sampled), next(sampled))) for _ in range(REPEATS) for size in sizes]
    place, outputs = joined.pop("place"), joined.pop("outputs")
    if not ((joined["first"] < K) & (joined["second"] < K)).all():
        joined["embedding"] = joined["magnitudes"]  # the paper's has no place for some of the functions
    return Samples(
        known=joined,
        place=place,
        outputs=None if getattr(learner.policy, "blind", False) else outputs,
        alignment={size: [both for other, both in drawn if other == size] for size in sizes},
    )


def halves(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two halves without a common image, in an order of which any beginning has the same classes in both.

    Otherwise a draw with more images of a class than another would mostly say that, and two halves the opposite.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randperm(int(labels.max()) + 1, generator=generator)[labels]  # beginnings may be without some
    order = torch.randperm(len(labels), generator=generator)
    order = order[classes[order].argsort(stable=True)]
    classes = classes[order]
    turn = torch.arange(len(order)) - torch.searchsorted(classes, classes)  # of an image among those of its class
    by_turn = turn.argsort(stable=True)
    order, turn, count = order[by_turn], turn[by_turn], torch.bincount(classes)[classes[by_turn]]
    paired = turn < count - count % 2
    return order[paired & (turn % 2 == 0)], order[paired & (turn % 2 == 1)]


def _known(look: Observation) -> dict[str, Tensor]:
    """What a policy could be told of the samples."""
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
    """Of the mean loss of these images, in parts of a mini-batch, so that memory does not grow with their number."""
    total: list[Tensor] = []
    size = -(-len(places) // -(-len(places) // like.batch))  # parts alike: one image alone has no batch statistics
    for images, labels in once(split.take(places.to(split.labels.device)), like.device, like.reader, size):
        share = len(labels) / len(places)
        part = [share * gradient for gradient in learner.validation_gradient(images, labels)]
        total = [a + b for a, b in zip(total, part, strict=True)] if total else part
    return total
