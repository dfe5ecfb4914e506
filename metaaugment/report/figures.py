"""Pictures of a learned policy: the distribution over pairs of functions, and samples of high and low weight."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from torch import Tensor

from metaaugment.atomic import write_atomically
from metaaugment.data.files import CorruptImage, middle, read_image
from metaaugment.ops import OPS, PAPER_OPS, Space, find_space
from metaaugment.report.picture import show
from metaaugment.source import Source
from metaaugment.transfer import LearnedPolicy
from metaaugment.transformation import Transformation

ENDINGS = (".png", ".svg", ".pdf", ".jpg")  # of picture files


def distribution(probabilities: Float[Tensor, "K K"], title: str) -> Figure:
    """p_{j,k} as a heat map, each cell as a multiple of the uniform probability."""
    names = [op.name for op in PAPER_OPS]
    relative = (probabilities * probabilities.numel()).cpu().numpy()
    figure = Figure(figsize=(7.6, 6.6), layout="constrained")
    axes = figure.subplots()
    # Blue below uniform, red above, white at uniform, whatever the range.
    reach = max(abs(relative - 1).max(), 0.05)
    image = axes.imshow(relative, cmap="RdBu_r", vmin=1 - reach, vmax=1 + reach)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel="second function", ylabel="first function", title=title)
    figure.colorbar(image, label="probability, as a multiple of uniform", shrink=0.85)
    return figure


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


def photos(files: Sequence[Path], source: Source) -> UInt8[Tensor, "n c h w"]:
    """The middle of each picture, in the size and channels that a policy was learned on."""
    (height, width), side = source.size, max(source.size)
    left, top = (side - width) // 2, (side - height) // 2
    box, mode = (left, top, left + width, top + height), "RGB" if source.channels == 3 else "L"
    try:
        views = [middle(read_image(file), side).crop(box).convert(mode) for file in files]
    except CorruptImage as error:
        raise ValueError(f"{error}; leave it out") from None
    pixels = torch.stack([torch.from_numpy(np.array(view)).view(height, width, -1) for view in views])
    return pixels.permute(0, 3, 1, 2).contiguous()


def copies(
    images: UInt8[Tensor, "n c h w"], policy: LearnedPolicy, count: int, generator: torch.Generator | None = None
) -> Figure:
    """Each image in a row of its own, followed by augmented copies; 1 is the mean weight of a row."""
    figure = Figure(figsize=(1.5 * (count + 1), 1.95 * len(images)), layout="constrained")
    for row, image in zip(figure.subplots(len(images), count + 1, squeeze=False), images, strict=True):
        augmented, t = policy.transform(image.expand(count, -1, -1, -1), generator)
        weights = policy.weights(augmented, t) * count
        for axis, picture in zip(row, (image, *augmented), strict=True):
            show(axis, picture)
        row[0].set_title("original", fontsize=6.5)
        for place, axis in enumerate(row[1:]):
            words = "\n".join(describe(t[place], policy.space, *image.shape[-2:]))
            axis.set_title(f"{float(weights[place]):.2f}\n{words}", fontsize=6.5)
    return figure


def describe(transformation: Transformation, space: str | Space, height: int, width: int) -> Sequence[str]:
    """The two functions of one transformation in words: "Rotate 12", with the argument the space gives."""
    space = find_space(space)
    lines = []
    for place, index in enumerate((transformation.first, transformation.second)):
        op = OPS[int(index)]
        magnitude, sign = transformation.magnitudes[:, place].double(), transformation.signs[:, place]
        argument = space.arguments(index, magnitude, sign, height, width)
        lines.append(f"{op.name} {float(argument[0]):.3g}" if op.magnitude else op.name)
    return lines


def check(file: Path, flag: str) -> None:
    """Refuse, before the work, a name that no picture can be saved under; nothing is overwritten."""
    if file.suffix.lower() not in ENDINGS or file.is_dir():
        raise ValueError(f"{flag} {file} is not a name for a picture; give it one of the endings {', '.join(ENDINGS)}")
    if file.exists():
        raise ValueError(f"{flag} {file} exists already; choose another name, or remove it")


def save(figure: Figure, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda part: figure.savefig(part, dpi=130, format=file.suffix[1:]))
    return file
