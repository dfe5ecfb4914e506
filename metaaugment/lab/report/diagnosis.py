"""What a diagnosis found, in words and as a picture."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metaaugment.lab.experiments.diagnosis import Diagnosis
from metaaugment.lab.report.picture import COLORS, INK, Picture, drawing, panel

TITLE = "Does it learn, and could it learn more?"
PREDICTED, NOISE = "What can be predicted", "How far two draws agree"


def in_words(found: Diagnosis) -> list[str]:
    """A line for each thing that was measured, and the verdict."""
    return [
        f"{found.samples:,} training samples, {found.validation:,} validation images",
        "The alignment of a sample says how far a step on it lowers the validation loss; all figures are correlations.",
        "",
        "how far two draws of validation images agree on it",
        *(_row(f"  {size:,} images each", noise) for size, noise in found.noise.items()),
        "how well it can be predicted, on other samples and with the other half of the validation images",
        *(_row(f"  from {name}", value) for name, value in found.predicted.items()),
        _row("in the outputs of the policy", found.captured or "it has none"),
        "",
        found.verdict(),
    ]


def _row(words: str, value: object) -> str:
    return f"{words:40}{value!s:>12}"


@drawing()
def picture(found: Diagnosis, done: int | None = None) -> Picture:
    """What can be predicted beside what is captured, and the noise of the validation images, in one picture.

    Args:
        done: epochs that the run has finished by now; if the diagnosis is older, the picture says so.
    """
    figure = Figure(figsize=(8.8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_predicted(left, found)
    _draw_noise(right, found)
    said = reading(found, done)
    return Picture("diagnosis", TITLE, said, f"{said} {_predicted_words(found)} {_noise_words(found)}", figure)


def reading(found: Diagnosis, done: int | None) -> str:
    if found.epoch is not None and done is not None and found.epoch < done:
        return f"Measured after epoch {found.epoch}, and the run has {done} by now: {found.verdict()}"
    return found.verdict()


@drawing()
def panels(found: Diagnosis) -> list[Picture]:
    """The same as two pictures, side by side on a page and one below the other on a phone."""
    (left, predicted), (right, noise) = panel(4.4, 3.1), panel(4.4, 3.1)
    _draw_predicted(predicted, found)
    _draw_noise(noise, found)
    captured = "" if found.captured is None else " The line is the correlation of the policy's outputs."
    return [
        Picture(
            "predicted", PREDICTED,
            "From the inputs on the left, on other samples; error bars show the deviation over validation halves."
            f"{captured}",
            _predicted_words(found), left,
        ),
        Picture(
            "noise", NOISE, "Near 1, that many validation images tell which samples help; near 0, they do not.",
            _noise_words(found), right,
        ),
    ]  # fmt: skip


def _draw_predicted(axes: Axes, found: Diagnosis) -> None:
    names = list(found.predicted)[::-1]
    values = [found.predicted[name] for name in names]
    axes.barh(
        range(len(names)), [v.mean for v in values], xerr=[v.deviation for v in values], color=COLORS[0], ecolor=INK
    )
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="y", visible=False)
    axes.set(title=PREDICTED, xlabel="correlation with the alignment")
    if found.captured is not None:
        axes.axvline(found.captured.mean, color=COLORS[1], label="the policy's outputs")
        axes.legend(loc="upper right", bbox_to_anchor=(1, -0.18), borderaxespad=0, fontsize=8)  # below all bars


def _draw_noise(axes: Axes, found: Diagnosis) -> None:
    sizes, noise = list(found.noise), list(found.noise.values())
    axes.errorbar(sizes, [v.mean for v in noise], [v.deviation for v in noise], marker="o", color=COLORS[2])
    axes.set(title=NOISE, xlabel="validation images of a draw", xscale="log", ylim=(None, 1.02))
    # The largest size is half of the validation images, and may be so near the one before that their labels overlap.
    width = math.log(max(sizes) / min(sizes))
    named = [size for size in sizes if size == max(sizes) or math.log(max(sizes) / size) > 0.15 * width]
    axes.set_xticks(named, [f"{size:,}" for size in named], fontsize=8)
    axes.minorticks_off()


def _predicted_words(found: Diagnosis) -> str:
    said = "; ".join(f"from {name} {value}" for name, value in found.predicted.items())
    captured = "" if found.captured is None else f" The policy's outputs have {found.captured}."
    return f"Correlations with the alignment, {said}.{captured}"


def _noise_words(found: Diagnosis) -> str:
    said = "; ".join(f"{value.mean:.2f} with {size:,} images" for size, value in found.noise.items())
    return f"Two draws of validation images correlate at {said}."
