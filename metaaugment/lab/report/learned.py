"""Pictures of what a policy has learned: of functions, magnitudes, classes and samples."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from torch import Tensor

from metaaugment.lab.report.operations import describe
from metaaugment.lab.report.picture import COLORS, INK, PAPER, Picture, drawing, panel, show, tint
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
from metaaugment.lab.report.seen import Card, Seen
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
    figure, axes = panel(7.6, 6.6)
    # Blue below uniform, red above, white at uniform, whatever the range.
    reach = max(abs(relative - 1).max(), 0.05)
    image = axes.imshow(relative, cmap="RdBu_r", vmin=1 - reach, vmax=1 + reach)
    axes.set_xticks(range(len(NAMES)), NAMES, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(NAMES)), NAMES, fontsize=8)
    axes.set(xlabel="second function", ylabel="first function", title=title)
    figure.colorbar(image, label="probability, as a multiple of uniform", shrink=0.85)
    return figure


@drawing()
def marginals(p: np.ndarray, epoch: int) -> Picture:
    """How often each function is drawn as the first and as the second."""
    p = p / p.sum()
    parts = {"first": p.sum(1) * len(p)} | ({} if single(p) else {"second": p.sum(0) * len(p)})
    order = np.argsort(sum(parts.values()), kind="stable")
    figure, axes = panel(4.4, 3.5)
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
    low, high = _bounds([mean for function in by_function(seen) for mean in by_magnitude(seen, function)])
    return min(0.9, np.nanmin(low)) - 0.05, max(1.1, np.nanmax(high)) + 0.05


@drawing()
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
    axes.axhline(1, color=INK, linewidth=0.7, linestyle=":")
    axes.fill_between(centers, *_bounds(means), color=COLORS[0], alpha=0.3, linewidth=0)
    weights = [mean.weight for mean in means]
    axes.plot(centers, weights, color=COLORS[0], marker="o" if len(means) > 2 else "", markersize=2.5)
    axes.set(title=name, xlim=(0, MAX_MAGNITUDE), xticks=[0, 5, 10])


def _bounds(means: Sequence[Mean]) -> tuple[np.ndarray, np.ndarray]:
    """A standard error below the means, and above; that of a single sample is not known, and counts as 0."""
    weights, errors = np.array([(mean.weight, mean.error) for mean in means]).T
    return weights - np.nan_to_num(errors), weights + np.nan_to_num(errors)


def _magnitude_words(means: Sequence[Mean]) -> str:
    if len(means) == 1:
        return f"mean weight {means[0].weight:.2f} of {means[0].count} samples, it takes no magnitude"
    width = MAX_MAGNITUDE / BINS
    parts = [
        f"{width * place:g} to {width * (place + 1):g} {mean.weight:.2f}"
        for place, mean in enumerate(means) if mean.count
    ]  # fmt: skip
    return f"mean weight by magnitude {', '.join(parts)}, of {sum(mean.count for mean in means)} samples"


@drawing()
def classes(seen: Seen) -> Picture | None:
    """Mean weights of classes, under any function and under each, as multiples of the mean over all classes there.

    None if there is no class to show.
    """
    found = by_class(seen)
    if not found.labels:
        return None
    names = ["any function", *(OPS[function].name for function in found.functions)]
    relative = np.column_stack([[mean.weight for mean in found.means], found.relative])
    figure, axes = panel(4.9, (1.5 if found.functions else 0.2) + 0.22 * len(found.labels))
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


def cards(seen: Seen, side: int | None = None) -> dict[str, list[Card]]:
    """The same with all that is shown of each; `side`: of the images in pixels, if they are shown smaller."""
    return {kind: [seen.card(place, side) for place in places] for kind, places in shown(seen).items()}


def samples(kinds: Mapping[str, Sequence[Card]], epoch: int) -> Picture:
    """Augmented samples with the highest and lowest weights, for a file; a page shows them one by one."""
    columns = max(1, len(kinds["high"]) // 2)
    chosen = {name: kinds[name][: 2 * columns] for name in ("high", "low")}
    title = f"Augmented samples with the highest and lowest weights, after epoch {epoch}; 1 is the mean"
    tiles = {name: [(card.image, card.weight, card.functions) for card in part] for name, part in chosen.items()}
    words = "; ".join(card.words for part in chosen.values() for card in part)
    reading = "Above each sample its weight and its transformation."
    return Picture("samples", title, reading, words, _tiled(tiles, title, columns))


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
    relative = (weights * len(weights)).tolist()
    tiles = {
        name: [
            (images[place], relative[place], describe(transformation[place], space, *images.shape[-2:]))
            for place in part[: 2 * columns].tolist()
        ]
        for name, part in (("high", order), ("low", order.flip(0)))
    }
    return _tiled(tiles, title, columns)


def _tiled(parts: Mapping[str, Sequence[tuple[Tensor, float, Sequence[str]]]], title: str, columns: int) -> Figure:
    """Images with their weights and functions: one part above the other, up to two rows each."""
    figure = Figure(figsize=(1.5 * columns, 8.2), layout="constrained")
    figure.suptitle(title)
    halves: Any = figure.subfigures(len(parts), 1)
    for half, (name, tiles) in zip(halves, parts.items(), strict=True):
        half.suptitle(f"{name} weights", fontsize=10)
        panels = half.subplots(-(-len(tiles) // columns), columns, squeeze=False).flat
        for axis, (image, weight, functions) in zip(panels, tiles, strict=True):
            show(axis, image)
            axis.set_title("\n".join((f"{weight:.2f}", *functions)), fontsize=6.5)
    return figure


CONTRAST_TITLES = {"hard": "high loss, low weight", "easy": "low loss, high weight"}


@drawing()
def contrasts(kinds: Mapping[str, Sequence[Card]]) -> Picture:
    """Samples whose weights go against their losses: the paper's figure of Omniglot.

    Each is shown as it was, augmented, and, if that was looked for, beside the nearest validation image of another
    class.
    """
    rows, columns = len(list(_stages(kinds["hard"][0]))), len(kinds["hard"])
    figure = Figure(figsize=(0.6 + 1.15 * columns, 2 * (0.55 + 1.2 * rows)), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    for half, (name, title) in zip(halves, CONTRAST_TITLES.items(), strict=True):
        half.suptitle(title, fontsize=10)
        panels = half.subplots(rows, columns, squeeze=False)
        for column, card in zip(panels.T, kinds[name], strict=True):
            for axes, (what, image, words) in zip(column, _stages(card), strict=True):
                show(axes, image)
                axes.grid(visible=False)
                axes.set_title(words, fontsize=6, loc="center", fontweight="normal")
                axes.set_ylabel(what if card is kinds[name][0] else "", fontsize=8)
    words = "; ".join(card.words for name in CONTRAST_TITLES for card in kinds[name])
    reading = "What a transformation made look like another class has a high loss and should have a low weight."
    return Picture("contrasts", "Weights against losses", reading, words, figure)


def _stages(card: Card) -> Iterator[tuple[str, Tensor, str]]:
    """What is shown of a sample, from the top down, and what is said above each."""
    yield "original", card.original, shortened(card.label)
    yield "augmented", card.image, "\n".join((*card.functions, f"w {card.weight:.2f}, l {card.loss:.2g}"))
    if card.negative is not None:
        yield "hard negative", card.negative, f"{shortened(card.negative_label)}\n{card.similarity:.2f} alike"
