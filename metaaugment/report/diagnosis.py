"""What a diagnosis found, in words and as a picture."""

from matplotlib.figure import Figure

from metaaugment.experiments.diagnosis import Diagnosis
from metaaugment.report.picture import COLORS, INK, Picture, drawn


def in_words(found: Diagnosis) -> list[str]:
    """A line for each thing that was measured, and the verdict."""
    lines = [
        f"{found.samples:,} training samples, {found.validation:,} validation images; all figures are correlations",
        "",
        "how far two draws of validation images agree on which samples help",
        *(f"  {size:>6,} images each            {noise}" for size, noise in found.noise.items()),
        "what can be predicted of it, on other samples and by the other half of the images",
        *(f"  from {name:<33} {value}" for name, value in found.predicted.items()),
        f"in the outputs of the policy           {'it has none' if found.captured is None else found.captured}",
        "",
        found.verdict(),
    ]
    return lines


@drawn
def picture(found: Diagnosis, done: int | None = None) -> Picture:
    """What can be predicted beside what is captured, and the noise of the validation images.

    Args:
        done: epochs that the run has by now; a diagnosis that is older says so.
    """
    figure = Figure(figsize=(8.8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    names = list(found.predicted)[::-1]
    values = [found.predicted[name] for name in names]
    left.barh(
        range(len(names)), [v.mean for v in values], xerr=[v.deviation for v in values], color=COLORS[0], ecolor=INK
    )
    left.set_yticks(range(len(names)), names)
    left.grid(axis="y", visible=False)
    if found.captured is not None:
        left.axvline(found.captured.mean, color=COLORS[1], label="the policy's outputs")
        left.legend(loc="lower right", fontsize=8)
    left.set(title="What can be predicted, from what", xlabel="correlation with the alignment")
    sizes = list(found.noise)
    noise = list(found.noise.values())
    right.errorbar(sizes, [v.mean for v in noise], [v.deviation for v in noise], marker="o", color=COLORS[2])
    right.set(title="How far two draws agree", xlabel="validation images of a draw", xscale="log", ylim=(None, 1.02))
    right.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7)
    right.minorticks_off()
    captured = "" if found.captured is None else f" The policy's outputs have {found.captured}."
    reading = found.verdict()
    if found.epoch is not None and done is not None and found.epoch < done:
        reading = f"Measured after epoch {found.epoch}, and the run has {done} by now: {reading}"
    words = (
        f"{reading} Correlations with the alignment, "
        + "; ".join(f"from {name} {value}" for name, value in found.predicted.items())
        + f".{captured} Two draws of validation images agree by "
        + "; ".join(f"{value.mean:.2f} at {size:,} images" for size, value in found.noise.items())
        + "."
    )
    return Picture("diagnosis", "Does it learn, and could it learn more?", reading, words, figure)
