"""The measurements of Theorems 1 and 2, as a figure and in words."""

import statistics
from collections.abc import Callable, Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metaaugment.lab.experiments.convergence import (
    EYES,
    Run,
    exact_training_rate,
    lemma_rate,
    moved_rate,
    slope,
    slopes,
    training_rate,
    validation_rate,
)


def figure(runs: Sequence[Run]) -> Figure:
    """Both averages and the distance that θ moves, against T, beside the orders of their bounds; all with slopes."""
    drawing = Figure(figsize=(12.5, 4), layout="constrained")
    validation, training, moved = drawing.subplots(1, 3)
    orders = {r"$\log T/\sqrt{T\log\log T}$, theorems": validation_rate, r"$(\log T/T)^2$, Lemma 1": lemma_rate}
    _panel(validation, runs, "validation", orders)
    validation.set_title(r"average of $\|\nabla_\theta L^{val}(\hat w_t(\theta_t))\|^2$")
    orders = {r"$\log\log T/\log T$, Theorem 1": training_rate, r"$1/\log T$, no variance": exact_training_rate}
    _panel(training, runs, "training", orders)
    training.set_title(r"average of $\|\nabla_w L^{tr}(w_t, \theta_{t+1})\|^2$")
    bias = f"Theorem 2 lets shared eyes\nkeep up to {_bias(runs):.2g}"
    training.text(0.04, 0.05, bias, transform=training.transAxes, fontsize=8)
    _panel(moved, runs, "moved", {r"$T\alpha\beta$, Lemma 1": moved_rate})
    moved.set_title(r"$\|\theta_T - \theta_0\|$, how far the policy moves")
    return drawing


def _panel(axes: Axes, runs: Sequence[Run], name: str, orders: dict[str, Callable[[float], float]]) -> None:
    """Geometric means, whose slope is the mean slope of the seeds, and deviations; orders start where own eyes do."""
    horizons = sorted({run.horizon for run in runs})
    begin = None
    for eyes in EYES:
        values = [[getattr(r, name) for r in runs if r.eyes == eyes and r.horizon == horizon] for horizon in horizons]
        means = [statistics.geometric_mean(some) for some in values]
        spread = [statistics.stdev(some) if len(some) > 1 else 0.0 for some in values]
        label = f"{eyes} eyes: {slope(horizons, means):.3f}"
        axes.errorbar(horizons, means, spread, marker="o", markersize=4, capsize=3, label=label)
        begin = begin or means[0]
    assert begin is not None
    for (said, order), style in zip(orders.items(), ("--", ":"), strict=False):
        line = [order(horizon) * begin / order(horizons[0]) for horizon in horizons]
        axes.plot(horizons, line, style, color="grey", label=f"{said}: {slope(horizons, line):.3f}")
    axes.margins(y=0.12)
    axes.set(xscale="log", yscale="log", xlabel="T")
    axes.set_xticks(horizons, [str(horizon) for horizon in horizons])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.legend(fontsize=8, title="slopes", title_fontsize=8)


def _bias(runs: Sequence[Run]) -> float:
    """The largest bias that Theorem 2 allows, over the runs with shared eyes."""
    return max(run.bias for run in runs if run.eyes == "shared")


def in_words(runs: Sequence[Run]) -> Iterator[str]:
    """A line on each slope, and on what Theorem 2's bias comes to."""
    for one in slopes(runs):
        deviation = "" if one.deviation is None else f" ± {one.deviation:.3f}"
        yield (
            f"{one.average}, {one.eyes} eyes: falls as T^{one.mean:.3f}{deviation}; "
            f"the theorem's bound as T^{one.theorem:.3f}, the sharper one as T^{one.sharper:.3f}"
        )
    shared = [run for run in runs if run.eyes == "shared"]
    drift = [run.drift for run in shared]
    yield (
        f"bias of shared eyes: Theorem 2 allows up to {_bias(runs):.3g}; changing weights added {min(drift):.1e} to "
        f"{max(drift):.1e}, and the whole training average is {max(run.training for run in shared):.1e} or less"
    )
    late = sorted({run.horizon for run in runs if max(run.conditions) >= 1})
    if late:
        yield f"not yet sufficiently large for the theorems, under the constants seen: T = {', '.join(map(str, late))}"
