"""What a policy prefers: mean weights by function, by magnitude and by class, and p_{j,k} in words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaaugment.lab.report.seen import Seen
from metaaugment.ops import INDEX, MAX_MAGNITUDE, OPS, PAPER_OPS

BINS = 5  # of magnitudes
ENOUGH = 8  # fewest samples of a class under a function for their mean to be shown
FEWEST = 4  # the same under any function: fewer suffice, as the error comes from the deviation of all samples
MOST_CLASSES = 20
ERRORS, CHANCE = 2, 0.0455  # standard errors by which a class must differ, and the share of classes that do by chance
NAMED = 3  # so many of the highest, and of the lowest


@dataclass(frozen=True)
class Mean:
    """A mean weight, its standard error, and how many samples are behind it; 1 is the mean of all weights."""

    weight: float
    error: float
    count: int

    @staticmethod
    def of(weights: np.ndarray) -> "Mean":
        n = len(weights)
        error = float(weights.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
        return Mean(float(weights.mean()) if n else float("nan"), error, n)


def single(p: np.ndarray) -> bool:
    """Whether a distribution over pairs is one over single functions: nothing but Identity comes second."""
    return not np.delete(p, INDEX["Identity"], axis=1).any()


def uses(seen: Seen, function: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, magnitudes and labels of the recent samples that got a function, as their first or second."""
    t, recent = seen.transformation, seen.recent()
    alone = bool((t.second == INDEX["Identity"]).all())  # single functions are drawn, and nothing comes second
    parts = []
    for slot, index in enumerate((t.first,) if alone else (t.first, t.second)):
        chosen = recent & (index.numpy() == function)
        parts.append((seen.weight[chosen], t.magnitudes[:, slot].numpy()[chosen], seen.label[chosen]))
    weights, magnitudes, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return weights, magnitudes, labels


def by_function(seen: Seen) -> dict[int, Mean]:
    """The mean weight of the samples that got each function; functions never drawn are left out."""
    means = {function: Mean.of(uses(seen, function)[0]) for function in range(len(OPS))}
    return {function: mean for function, mean in means.items() if mean.count}


def by_magnitude(seen: Seen, function: int) -> list[Mean]:
    """The mean weight in each fifth of the magnitudes; for a function without magnitude, over all samples."""
    weights, magnitudes, _ = uses(seen, function)
    if not OPS[function].magnitude:
        return [Mean.of(weights)]
    place = np.clip((magnitudes / MAX_MAGNITUDE * BINS).astype(int), 0, BINS - 1)
    return [Mean.of(weights[place == part]) for part in range(BINS)]


@dataclass(frozen=True, eq=False)
class ByClass:
    """Mean weights of classes, the highest first, and which classes are left out."""

    labels: list[int]
    means: list[Mean]  # under any function, as multiples of what all classes get
    functions: list[int]  # those with enough samples of at least one of the classes
    relative: np.ndarray  # [labels, functions], multiples of a function's mean weight; NaN for too few samples
    total: int  # classes of the data
    known: int  # with enough samples for a mean
    differ: int  # of these, those that differ by more than chance; `known` if all are shown

    def left_out(self) -> str:
        """Which classes are not shown, and why; nothing where all are."""
        said, left = "", []
        if self.known > MOST_CLASSES:
            most = f", of which the {MOST_CLASSES} that differ most" if self.differ > MOST_CLASSES else ""
            said = (
                "Shown are classes whose mean weight differs from that of all by more than twice its standard error: "
                f"{f'{self.differ:,}' if self.differ else 'none'} of {self.known:,}{most}. Chance alone would give "
                f"about {CHANCE * self.known:.0f}. "
            )
            left.append(f"{self.known - len(self.labels):,} that differ less")
        if few := self.total - self.known:
            left.append(f"{few:,} with fewer than {FEWEST} samples here")
        return f"{said}Classes left out: {', '.join(left)}." if left else ""


def by_class(seen: Seen) -> ByClass:
    """Mean weights of all classes or, if there are many, of those that differ most from the mean, beyond chance."""
    recent = seen.recent()
    weights = seen.weight[recent]
    labels, rows, counts = np.unique(seen.label[recent], return_inverse=True, return_counts=True)
    mean = np.bincount(rows, weights) / counts / weights.mean()
    error = weights.std() / weights.mean() / np.sqrt(counts)  # that of as many samples of any class
    known = np.flatnonzero(counts >= FEWEST)
    many = len(known) > MOST_CLASSES
    # Equal weights differ by rounding alone, and their standard error is as small.
    differ = known[np.abs(mean - 1)[known] > np.maximum(ERRORS * error[known], 1e-6)] if many else known
    most = np.argsort(-np.abs(mean - 1)[differ] * np.sqrt(counts[differ]), kind="stable")[:MOST_CLASSES]
    shown = differ[most][np.argsort(-mean[differ[most]], kind="stable")]
    functions = list(by_function(seen))
    relative = np.full((len(shown), len(functions)), np.nan)
    for column, function in enumerate(functions):
        under, _, of = uses(seen, function)
        for row, label in enumerate(labels[shown]):
            if (of == label).sum() >= ENOUGH:
                relative[row, column] = under[of == label].mean() / under.mean()
    filled = np.flatnonzero(np.isfinite(relative).any(0))
    return ByClass(
        labels[shown].tolist(), [Mean(float(mean[row]), float(error[row]), int(counts[row])) for row in shown],
        [functions[column] for column in filled], relative[:, filled], max(len(seen.classes), len(labels)),
        len(known), len(differ),
    )  # fmt: skip


def extremes(p: np.ndarray, count: int = NAMED) -> str:
    """The pairs of functions that are drawn most and least, in words."""
    relative = p / p.sum() * p.size
    order = np.argsort(relative, axis=None, kind="stable")
    return f"most drawn {_pairs(relative, order[::-1][:count])}; least drawn {_pairs(relative, order[:count])}"


def _pairs(relative: np.ndarray, places: np.ndarray) -> str:
    words = []
    for place in places:
        j, k = divmod(int(place), relative.shape[1])
        words.append(f"{PAPER_OPS[j].name} then {PAPER_OPS[k].name} {relative[j, k]:.2f}")
    return ", ".join(words)


def ranked(values: Sequence[float], names: Sequence[str]) -> str:
    """The highest and the lowest by name; NaN has no rank."""
    known = sorted((value, name) for value, name in zip(values, names, strict=True) if value == value)
    if len(known) <= 2 * NAMED:
        return ", ".join(f"{name} {value:.2f}" for value, name in reversed(known))
    high = ", ".join(f"{name} {value:.2f}" for value, name in known[::-1][:NAMED])
    low = ", ".join(f"{name} {value:.2f}" for value, name in known[:NAMED])
    return f"highest {high}; lowest {low}"
