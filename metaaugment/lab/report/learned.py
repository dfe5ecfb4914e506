"""Pictures of what a policy has learned: of functions, magnitudes, classes and samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from torch import Tensor

from metaaugment.lab.report.operations import describe
from metaaugment.lab.report.picture import COLORS, INK, PAPER, Picture, drawn, show, tint
from metaaugment.lab.report.preferences import (
    BINS,
    ENOUGH,
    Mean,
    by_class,
    by_function,
    by_magnitude,
    extremes,
    ranked,
    single,
)
from metaaugment.lab.report.seen import Seen
from metaaugment.lab.training.look import CONTRASTS
from metaaugment.ops import MAX_MAGNITUDE, OPS, PAPER_OPS, Space
from metaaugment.transformation import Transformation

NAMES = [op.name for op in PAPER_OPS]


def distribution(p: np.ndarray, epoch: int) -> Picture:
    """p_{j,k} as a heat map; a page shows a table with a slider instead."""
    title = f"How often each pair of functions is drawn, after epoch {epoch}"
    words = f"Probabilities of pairs after epoch {epoch}, as multiples of the uniform one: {extremes(p)}."
    reading = "First function down, second across; red pairs are drawn more often than uniformly, blue ones less."
    return Picture("distribution", title, reading, words, heat_map(torch.from_numpy(p / p.sum()), title))


def heat_map(probabilities: Float[Tensor, "K K"], title: str) -> Figure:
    """p_{j,k} as a heat map, each cell as a multiple of the uniform probability."""
    relative = (probabilities * probabilities.numel()).cpu().numpy()
    figure = Figure(figsize=(7.6, 6.6), layout="constrained")
    axes = figure.subplots()
    # Blue below uniform, red above, white at uniform, whatever the range.
    reach = max(abs(relative - 1).max(), 0.05)
    image = axes.imshow(relative, cmap="RdBu_r", vmin=1 - reach, vmax=1 + reach)
    axes.set_xticks(range(len(NAMES)), NAMES, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(NAMES)), NAMES, fontsize=8)
    axes.set(xlabel="second function", ylabel="first function", title=title)
    figure.colorbar(image, label="probability, as a multiple of uniform", shrink=0.85)
    return figure


@drawn
def marginals(p: np.ndarray, epoch: int) -> Picture:
    """How often each function is drawn as the first and as the second."""
    p = p / p.sum()
    parts = {"first": p.sum(1) * len(p)} | ({} if single(p) else {"second": p.sum(0) * len(p)})
    order = np.argsort(sum(parts.values()), kind="stable")
    figure = Figure(figsize=(4.4, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, face, color in zip(parts, (COLORS[0], "none"), COLORS, strict=False):
        axes.plot(parts[name][order], range(len(p)), "o", markerfacecolor=face, color=color, label=name, markersize=5)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(p)), [NAMES[place] for place in order])
    axes.grid(axis="x", visible=False)
    if len(parts) > 1:
        figure.legend(loc="outside lower center", ncols=2, title="drawn as the", title_fontsize=8, fontsize=8)
    title = "Functions by how often they are drawn"
    axes.set(title=title, xlabel="multiple of the uniform probability")
    words = " ".join(
        f"As the {name} function after epoch {epoch}, as multiples of uniform: {ranked(values.tolist(), NAMES)}."
        for name, values in parts.items()
    )
    reading = "To the right of the dotted line: drawn more often than uniformly."
    return Picture("marginals", title, reading, words, figure)


def magnitude_limits(seen: Seen) -> tuple[float, float]:
    """Limits of the weight axis, shared by all pictures by magnitude so that they can be compared."""
    means = [mean for function in by_function(seen) for mean in by_magnitude(seen, function) if mean.count]
    low, high = min(m.weight - _error(m) for m in means), max(m.weight + _error(m) for m in means)
    return min(0.9, low) - 0.05, max(1.1, high) + 0.05


@drawn
def weight_by_magnitude(seen: Seen, functions: Sequence[int], columns: int = 1) -> Picture:
    """The mean weight of samples that got a function, by its magnitude; one panel per function."""
    rows = -(-len(functions) // columns)
    figure = Figure(figsize=(2 * columns, 1.55 * rows), layout="constrained")
    panels: Any = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    limits, words = magnitude_limits(seen), []
    for axes, function in zip(panels.flat, functions, strict=False):
        means = by_magnitude(seen, function)
        _by_magnitude(axes, means, OPS[function].name)
        axes.set_ylim(*limits)
        words.append(f"{OPS[function].name}: {_magnitude_words(means)}")
    for axes in panels.flat[len(functions) :]:
        axes.set_visible(False)
    reading = "The line is the mean weight of samples by magnitude from 0 to 10, the band its standard error."
    return Picture("magnitudes", "Weight against magnitude", reading, "; ".join(words) + ".", figure)


def _by_magnitude(axes: Any, means: Sequence[Mean], name: str) -> None:
    width = MAX_MAGNITUDE / BINS
    centers = [width * (part + 0.5) for part in range(BINS)] if len(means) > 1 else [0, MAX_MAGNITUDE]
    means = means if len(means) > 1 else [means[0]] * 2
    weights, errors = np.array([mean.weight for mean in means]), np.array([_error(mean) for mean in means])
    axes.axhline(1, color=INK, linewidth=0.7, linestyle=":")
    axes.fill_between(centers, weights - errors, weights + errors, color=COLORS[0], alpha=0.3, linewidth=0)
    axes.plot(centers, weights, color=COLORS[0], marker="o" if len(means) > 2 else "", markersize=2.5)
    axes.set(title=name, xlim=(0, MAX_MAGNITUDE), xticks=[0, 5, 10])


def _error(mean: Mean) -> float:
    return 0.0 if np.isnan(mean.error) else mean.error


def _magnitude_words(means: Sequence[Mean]) -> str:
    if len(means) == 1:
        return f"mean weight {means[0].weight:.2f} of {means[0].count} samples, it takes no magnitude"
    width = MAX_MAGNITUDE / BINS
    parts = [
        f"{width * place:g} to {width * (place + 1):g} {mean.weight:.2f}"
        for place, mean in enumerate(means) if mean.count
    ]  # fmt: skip
    return f"mean weight by magnitude {', '.join(parts)}, of {sum(mean.count for mean in means)} samples"


@drawn
def classes(seen: Seen) -> Picture | None:
    """Mean weights of classes, under any function and under each, as multiples of the mean over all classes there.

    None if there is no class to show.
    """
    found = by_class(seen)
    if not found.labels:
        return None
    names = ["any function", *(OPS[function].name for function in found.functions)]
    relative = np.column_stack([[mean.weight for mean in found.means], found.relative])
    figure = Figure(figsize=(4.9, (1.5 if found.functions else 0.2) + 0.22 * len(found.labels)), layout="constrained")
    axes = figure.subplots()
    reach = max(0.05, float(np.nanmax(np.abs(relative - 1))))
    axes.imshow(tint(np.nan_to_num(relative, nan=1.0), reach), aspect="auto", interpolation="nearest")
    for row, column in np.argwhere(np.isnan(relative)):
        axes.text(column, row, "·", ha="center", va="center", fontsize=7)
    for row, mean in enumerate(found.means):
        behind = "" if found.functions else f" ± {mean.error:.2f}, {mean.count} samples"
        axes.text(0, row, f"{mean.weight:.2f}{behind}", ha="center", va="center", fontsize=6.5)
    axes.axvline(0.5, color=PAPER, linewidth=3)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=7.5)
    if not found.functions:
        axes.set_xticks([])
    labels = [seen.name(label) for label in found.labels]
    axes.set_yticks(range(len(labels)), [shortened(label) for label in labels], fontsize=7.5)
    axes.grid(visible=False)
    for edge in axes.spines.values():
        edge.set_visible(False)
    pairs = [f"{label} under {name}" for label in labels for name in names]
    order = ranked(relative.flatten().tolist(), pairs)
    words = f"Weights of classes as multiples of a function's mean weight: {order}. {found.left_out()}".strip()
    reading = (
        f"Red: samples of the class weigh more under {'the' if found.functions else 'any'} function than samples of "
        f"all classes do; blue: less. Full color is {1 - reach:.2f} and {1 + reach:.2f}"
        + (f"; a dot has fewer than {ENOUGH} samples." if np.isnan(relative).any() else ".")
    )
    return Picture("classes", "Preferences by class", reading, words, figure)


def shortened(name: str) -> str:
    """A long name without its middle: classes in nested folders differ at both ends."""
    return name if len(name) <= 18 else f"{name[:8]}…{name[-9:]}"


def shown(seen: Seen) -> dict[str, list[int]]:
    """Places of the pictures by kind: the highest and lowest weights, and weights that go against the loss."""
    m = len(seen.pictures.sample)
    contrasts = min(CONTRASTS, m // 4)
    most = m // 2 - contrasts
    places, parts = list(range(m)), {}
    for name, count in (("high", most), ("low", most), ("hard", contrasts), ("easy", contrasts)):
        parts[name], places = places[:count], places[count:]
    return parts


def sample_words(seen: Seen, place: int, size: int) -> str:
    """What was done to a sample, and the weight and loss that it got."""
    sample = seen.pictures.sample[place]
    first, second = describe(seen.transformation[sample], seen.space, size, size)
    return (
        f"{seen.name(int(seen.label[sample]))}, {first}, then {second}: weight {seen.weight[sample]:.2f}, "
        f"loss {seen.loss[sample]:.2g}"
    )


def samples(seen: Seen, size: int) -> Picture:
    """Augmented samples with the highest and lowest weights, for a file; a page shows them one by one."""
    parts = shown(seen)
    columns = max(1, len(parts["high"]) // 2)
    places = torch.tensor([*parts["high"][: 2 * columns], *parts["low"][: 2 * columns]])
    rows = torch.tensor(seen.pictures.sample)[places]
    weight = torch.from_numpy(seen.weight)[rows]
    title = f"Augmented samples with the highest and lowest weights, after epoch {seen.epoch}; 1 is the mean"
    figure = weighted_samples(
        seen.pictures.images[places], seen.transformation[rows], weight / len(rows), seen.space, title, columns
    )
    words = "; ".join(sample_words(seen, int(place), size) for place in places)
    return Picture("samples", title, "Above each sample its weight and its transformation.", words, figure)


def weighted_samples(
    images: UInt8[Tensor, "n c h w"],
    transformation: Transformation,
    weights: Float[Tensor, " n"],
    space: str | Space,
    title: str,
    columns: int = 8,
) -> Figure:
    """The augmented images with the highest weights above those with the lowest; 1 is the mean weight."""
    order = weights.argsort(descending=True)
    figure = Figure(figsize=(1.5 * columns, 8.2), layout="constrained")
    figure.suptitle(title)
    halves: Any = figure.subfigures(2, 1)
    for half, part, name in zip(halves, (order, order.flip(0)), ("high", "low"), strict=True):
        half.suptitle(f"{name} weights", fontsize=10)
        for axis, place in zip(half.subplots(2, columns).flat, part[: 2 * columns].tolist(), strict=True):
            show(axis, images[place])
            weight = float(weights[place]) * len(weights)
            words = "\n".join(describe(transformation[place], space, *images.shape[-2:]))
            axis.set_title(f"{weight:.2f}\n{words}", fontsize=6.5)
    return figure


CONTRAST_TITLES = {"hard": "high loss, low weight", "easy": "low loss, high weight"}


@drawn
def contrasts(seen: Seen, size: int) -> Picture:
    """Samples whose weights go against their losses: the paper's figure of Omniglot.

    Each is shown as it was, augmented, and, if that was looked for, beside the nearest validation image of another
    class.
    """
    pictures, parts = seen.pictures, shown(seen)
    rows = {"original": pictures.originals, "augmented": pictures.images}
    rows |= {} if pictures.negatives is None else {"hard negative": pictures.negatives}
    columns = len(parts["hard"])
    figure = Figure(figsize=(0.6 + 1.15 * columns, 2 * (0.55 + 1.2 * len(rows))), layout="constrained")
    for half, (name, title) in zip(np.atleast_1d(figure.subfigures(2, 1)), CONTRAST_TITLES.items(), strict=True):  # type: ignore[arg-type]
        half.suptitle(title, fontsize=10)
        panels = half.subplots(len(rows), columns, squeeze=False)
        for line, (what, images) in zip(panels, rows.items(), strict=True):
            line[0].set_ylabel(what, fontsize=8)
            for axes, place in zip(line, parts[name], strict=True):
                show(axes, images[place])
                axes.grid(visible=False)
                axes.set_title(_contrast_title(seen, place, what, size), fontsize=6, loc="center", fontweight="normal")
    words = "; ".join(sample_words(seen, place, size) for name in CONTRAST_TITLES for place in parts[name])
    reading = "What a transformation made look like another class has a high loss and should have a low weight."
    return Picture("contrasts", "Weights against losses", reading, words, figure)


def _contrast_title(seen: Seen, place: int, what: str, size: int) -> str:
    sample = seen.pictures.sample[place]
    if what == "original":
        return shortened(seen.name(int(seen.label[sample])))
    if what == "hard negative":
        return (
            f"{shortened(seen.name(seen.pictures.negative_labels[place]))}\n{seen.pictures.similarity[place]:.2f} alike"
        )
    first, second = describe(seen.transformation[sample], seen.space, size, size)
    return f"{first}\n{second}\nw {seen.weight[sample]:.2f}, l {seen.loss[sample]:.2g}"
