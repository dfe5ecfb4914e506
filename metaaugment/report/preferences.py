"""What a policy prefers: mean weights by function, by magnitude and by class, and p_{j,k} in words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaaugment.ops import INDEX, MAX_MAGNITUDE, OPS, PAPER_OPS
from metaaugment.report.seen import Seen

BINS = 5  # of magnitudes
ENOUGH = 8  # samples behind a mean that is shown
MOST_CLASSES = 20


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
    """The mean weight of samples that got each function, of those that were drawn."""
    means = {function: Mean.of(uses(seen, function)[0]) for function in range(len(OPS))}
    return {function: mean for function, mean in means.items() if mean.count}


def by_magnitude(seen: Seen, function: int) -> list[Mean]:
    """The mean weight in each fifth of the magnitudes; of a function without one, over all samples."""
    weights, magnitudes, _ = uses(seen, function)
    if not OPS[function].magnitude:
        return [Mean.of(weights)]
    place = np.clip((magnitudes / MAX_MAGNITUDE * BINS).astype(int), 0, BINS - 1)
    return [Mean.of(weights[place == part]) for part in range(BINS)]


@dataclass(frozen=True, eq=False)
class ByClass:
    """Mean weights of classes under functions, as multiples of what each function gets over all classes."""

    labels: list[int]
    functions: list[int]
    relative: np.ndarray  # [labels, functions]; NaN behind too few samples
    counts: np.ndarray
    left_out: int  # classes that differ less, or have too few samples


def by_class(seen: Seen) -> ByClass:
    """Of the classes that differ most from the others, beyond what as many samples do by chance."""
    functions = list(by_function(seen))
    labels = np.unique(seen.label[seen.recent()])
    relative, counts = np.full((len(labels), len(functions)), np.nan), np.zeros((len(labels), len(functions)), int)
    surprise = np.zeros(len(labels))
    for column, function in enumerate(functions):
        weights, _, of = uses(seen, function)
        rows = np.searchsorted(labels, of)
        counts[:, column] = np.bincount(rows, minlength=len(labels))
        means = np.bincount(rows, weights, len(labels)) / np.maximum(counts[:, column], 1)
        enough = counts[:, column] >= ENOUGH
        relative[enough, column] = means[enough] / weights.mean()
        if weights.std() > 0:
            surprise += np.where(enough, counts[:, column] * (means - weights.mean()) ** 2 / weights.var(), 0)
    shown = [row for row in np.argsort(-surprise, kind="stable") if np.isfinite(relative[row]).any()][:MOST_CLASSES]
    shown = sorted(int(row) for row in shown)
    return ByClass(labels[shown].tolist(), functions, relative[shown], counts[shown], len(labels) - len(shown))


def extremes(p: np.ndarray, count: int = 3) -> str:
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


def ranked(values: Sequence[float], names: Sequence[str], count: int = 3) -> str:
    """The highest and the lowest by name; NaN has no rank."""
    known = sorted((value, name) for value, name in zip(values, names, strict=True) if value == value)
    if len(known) <= 2 * count:
        return ", ".join(f"{name} {value:.2f}" for value, name in reversed(known))
    high = ", ".join(f"{name} {value:.2f}" for value, name in known[::-1][:count])
    low = ", ".join(f"{name} {value:.2f}" for value, name in known[:count])
    return f"highest {high}; lowest {low}"
