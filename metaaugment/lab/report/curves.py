"""Pictures over epochs: the quantities in the log, a line per run, and how the weights spread."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from metaaugment.lab.report.comparison import Group
from metaaugment.lab.report.picture import COLORS, INK, Picture, drawing, panel
from metaaugment.lab.report.runs import Run
from metaaugment.lab.training.log import FIGURES

SIZE = (4.4, 2.7)  # inches: two beside each other on a page, one on a phone
READINGS = {
    "train_loss": (
        "Weighted training loss",
        "Of augmented samples, each counted by its weight; above the validation loss where augmentation is hard.",
    ),
    "val_loss": ("Validation loss", "Of images without augmentation; the policy learns to reduce it."),
    "val_accuracy": ("Validation accuracy", "Of images without augmentation, after each epoch."),
    "alpha": ("α, the learned inner step size", "How far the policy looks ahead; at 0 it learns nothing."),
    "effective_samples": (
        "Effective sample size",
        "Share of a mini-batch that effectively trains the network: 1 where all weights are equal, near 0 where a few "
        "samples have all the weight.",
    ),
    "controller_entropy": (
        "Entropy of the adversary",
        "As a share of the highest: 1 where the controller draws all policies equally often, near 0 where it has "
        "collapsed to one.",
    ),
}  # fmt: skip


WITH_POLICY = ("alpha", "effective_samples")  # in every row, but without a policy they say nothing
SHARES = ("effective_samples", "controller_entropy")


def has(run: Run, key: str) -> bool:
    """Whether there is something to draw of a quantity: some are only in the logs of some methods."""
    if key in WITH_POLICY and not run.has_policy:
        return False
    return bool(run.rows) if key in FIGURES else any(key in row for row in run.rows)


@drawing()
def over_epochs(together: Sequence[Group], key: str, legend: bool = True) -> Picture:
    """A quantity of the log by epoch: a color per group, a line per run."""
    title, reading = _titled(key, [run for group in together for run in group.runs])
    legend = legend and len(together) > 1
    figure, axes = panel(SIZE[0], SIZE[1] + (0.18 * len(together) if legend else 0))
    words, everything = [], []
    for place, group in enumerate(together):
        for number, run in enumerate(group.runs):
            values = run.values(key)
            axes.plot(
                run.epochs, values, color=COLORS[place % len(COLORS)], marker="o" if len(values) < 3 else "",
                markersize=4, linestyle=("-", "--", ":")[place // len(COLORS) % 3], alpha=1 if number == 0 else 0.55,
                label=group.label if number == 0 else None,
            )  # fmt: skip
            everything += values[np.isfinite(values)].tolist()
        words += [f"{group.label} {_course(run, key)}" for run in group.runs[:1]]
    if everything and key.endswith("loss") and min(everything) > 0 and max(everything) > 30 * min(everything):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    if key == "alpha":
        axes.update_datalim([(0, 0)], updatex=False)  # first, so that the margin above is one of the whole range
        axes.autoscale_view(scalex=False)
        axes.set_ylim(bottom=min(0, *everything) if everything else 0)
    if key in SHARES:
        axes.set_ylim(0, 1.04)
    _epoch_axis(axes, [int(epoch) for group in together for run in group.runs for epoch in run.epochs])
    axes.set(title=title)
    if legend:
        figure.legend(loc="outside lower left", fontsize=7)
    return Picture(key, title, reading, f"{title} by epoch: {'; '.join(words)}.", figure)


def _titled(key: str, runs: Sequence[Run]) -> tuple[str, str]:
    """Title and reading of a quantity, without a word of a policy where no run has one."""
    if key == "train_loss" and not any(run.has_policy for run in runs):
        return "Training loss", "Of augmented samples; above the validation loss where augmentation is hard."
    if key == "val_loss" and not any(run.learns for run in runs):
        return "Validation loss", "Of images without augmentation, after each epoch."
    return READINGS[key]


def _epoch_axis(axes: Axes, epochs: Sequence[int]) -> None:
    """Ticks at whole numbers only, even for a single epoch."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(set(epochs)) == 1:
        axes.set_xlim(epochs[0] - 0.5, epochs[0] + 0.5)
    axes.set(xlabel="epoch")


def _course(run: Run, key: str) -> str:
    """The first and last values of a quantity, in words; for a loss, also the lowest."""
    values = run.values(key)
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return "is not known"
    first, last = known[0], known[-1]
    if first == last:
        return f"is {values[first]:.3g} in epoch {run.epochs[first]}"
    best = known[values[known].argmin()]
    lowest = f", lowest {values[best]:.3g} in epoch {run.epochs[best]}" if key.endswith("loss") else ""
    begin, end = (f"{values[place]:.3g} in epoch {run.epochs[place]}" for place in (first, last))
    return f"goes from {begin} to {end}{lowest}"


@drawing()
def weight_spread(run: Run) -> Picture:
    """The quantiles of the weights of a mini-batch by epoch; a single epoch is drawn as a short stretch of the axis."""
    epochs, quantiles = run.quantiles
    alone = len(epochs) == 1
    x, y = (epochs[0] + np.array([-0.25, 0.25]), quantiles.repeat(2, 0)) if alone else (epochs, quantiles)
    figure, axes = panel(*SIZE)
    for low, high, strength in ((0, 6, 0.18), (1, 5, 0.28), (2, 4, 0.45)):
        axes.fill_between(x, y[:, low], y[:, high], color=COLORS[0], alpha=strength, linewidth=0)
    axes.plot(x, y[:, 3], color=INK)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    _epoch_axis(axes, epochs.tolist())
    title = f"Weights after epoch {epochs[0]}" if alone else "Weights over time"
    axes.set(ylabel="weight, 1 is the mean", title=title)
    last = quantiles[-1]
    before = f"; after epoch {epochs[0]} nine tenths were {quantiles[0][1]:.2f} to {quantiles[0][5]:.2f}"
    words = (
        f"Weights of a mini-batch after epoch {epochs[-1]}: median {last[3]:.2f}, half of them {last[2]:.2f} to "
        f"{last[4]:.2f}, nine tenths {last[1]:.2f} to {last[5]:.2f}, all {last[0]:.2f} to {last[6]:.2f}"
        f"{'' if alone else before}."
    )
    reading = "The line is the median; the bands hold half, nine tenths and all of the samples of a mini-batch."
    return Picture("weights", title, reading, words, figure)
